"""Random histories of a manager beside two plain lists (`tests.oracles.tiers`), compared after every operation.

Compared are the slot table, the weights in the slots bit for bit, both tiers in the order of use, the pins, the
counters, and the backend's translation of rows to slots.
"""

from functools import partial

from minivllm.lora.mapping import LoRAMapping
from tests.worlds.managers import adapter_of, assert_slot_holds, random_weights

IDS = range(1, 8)
OUTCOMES = (LookupError, ValueError, RuntimeError, OSError)


class History:
    """A manager and its model, driven side by side.

    told   the operation that is on, and what there was before it, in a line or two
    """

    def __init__(self, manager, model, rng, monkeypatch):
        self.manager, self.model, self.rng = manager, model, rng
        self.versions = 0
        self.told = ""
        layer = manager.modules["mlp.gate_up_proj"]
        write = layer.write

        def copy(*args):
            if model.copy_fails:
                raise OSError("device lost")
            write(*args)

        # Every adapter here has weights for the layer, so that the copy always comes by.
        monkeypatch.setattr(layer, "write", copy)

    def new_weights(self):
        self.versions += 1
        while "mlp.up_proj" not in (weights := random_weights(self.rng.randrange(10**6))).pairs:
            pass
        return weights

    def operation(self, names):
        """A random operation as two calls: on the manager and on the model."""
        name, adapter_id = self.rng.choice(names), self.rng.choice(IDS)
        manager, model = self.manager, self.model
        text = f"{name}({adapter_id})"
        if name == "add":
            weights = self.new_weights()
            ours = partial(manager.add_adapter, adapter_of(adapter_id, weights))
            theirs = partial(model.add, adapter_id, weights)
        elif name == "replace":
            weights = self.new_weights()
            ours = partial(manager.replace_adapter, adapter_of(adapter_id, weights))
            theirs = partial(model.replace, adapter_id, weights)
        elif name == "remove_oldest":
            ours, theirs, text = manager.remove_oldest_adapter, model.remove_oldest, "remove_oldest()"
        elif name == "in_use":
            in_use = frozenset(self.rng.sample(IDS, self.rng.choice([0, 1, 2])))
            ours, theirs = partial(manager.set_in_use, in_use), partial(setattr, model, name, in_use)
            text = f"in_use = {sorted(in_use)}"
        else:
            ours = partial(getattr(manager, f"{name}_adapter"), adapter_id)
            theirs = partial(getattr(model, name), adapter_id)
        # A reload that fails half-way has a test of its own.
        model.copy_fails = name in ("activate", "pin") and self.rng.random() < 0.1
        fails = ", of which any copy fails" if model.copy_fails else ""
        self.told = (
            f"{text}{fails}, with {model.capacity} places in memory, where before it\n"
            f"  slots {model.slots}, pinned {sorted(model.pins)}, in use {sorted(model.in_use)}, "
            f"in memory, oldest first, {model.by_use(model.memory)}"
        )
        return ours, theirs

    def same(self, what, found, expected):
        __tracebackhide__ = True
        assert found == expected, f"{self.told}\n{what}: expected {expected}\n  found {found}"

    def check(self):
        __tracebackhide__ = True
        manager, model, same = self.manager, self.model, self.same
        same("slots", manager.lora_index_to_id, model.slots)
        same(
            "slot by adapter", manager.list_active_adapters(), {a: s for s, a in enumerate(model.slots) if a}
        )
        same("in slots, oldest first", list(manager.list_active_adapters()), model.by_use(model.active()))
        same("free slots", manager.get_free_slots(), [s for s, a in enumerate(model.slots) if a is None])
        same("in memory, oldest first", list(manager.list_adapters()), model.by_use(model.memory))
        same("number in memory", len(manager), len(model.memory))
        same("pinned", manager.pinned_adapters, model.pins)
        for slot, adapter_id in enumerate(model.slots):
            if adapter_id is not None:
                whose = f"adapter {adapter_id} after {self.told}"
                assert_slot_holds(manager, slot, model.memory[adapter_id], whose)
        counted = manager.stats.evictions, manager.stats.cpu_evictions, manager.stats.activations
        same("evictions, drops, activations", counted, (model.evictions, model.drops, model.copies))
        self.check_translation()

    def check_translation(self):
        """The same rows before and after: only the slot table can tell that something moved."""
        __tracebackhide__ = True
        rows = tuple(sorted(self.model.active()))
        self.manager.set_adapter_mapping(LoRAMapping((0, *rows), rows))

        slots = [self.model.slots.index(adapter_id) for adapter_id in rows]
        backend = self.manager.punica_wrapper
        self.same(f"slots of rows {[0, *rows]}", backend.token_lora_indices.tolist(), [-1, *slots])
        self.same(f"slots of sampled rows {[*rows]}", backend.sampler_indices.tolist(), slots)


def outcome(call):
    try:
        return call()
    except OUTCOMES as error:
        return type(error)


def run(history, names, steps):
    __tracebackhide__ = True
    for _ in range(steps):
        ours, theirs = history.operation(names)

        found, expected = outcome(ours), outcome(theirs)

        history.same("outcome", found, expected)
        history.check()
