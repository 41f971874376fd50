"""The managers after every operation of random histories, against two plain lists (`tiers_model`).

After each operation the slot table, the weights in the slots bit for bit, both tiers in the order of use, the
pins, the counters and the backend's row-to-slot translation are what the model says.
"""

import random
from functools import partial

import pytest
from small_model import adapter_of, make_manager, make_plain_manager, random_weights, slot_holds
from tiers_model import TwoTiers

from minivllm.lora.layers import LoRAMapping

pytestmark = [pytest.mark.lab(f"5.{n}") for n in (2, 3, 4, 5, 6)]

IDS = range(1, 8)
OUTCOMES = (ValueError, RuntimeError, OSError)


class History:
    """A manager and its model, driven side by side."""

    def __init__(self, manager, model, rng, monkeypatch):
        self.manager, self.model, self.rng = manager, model, rng
        self.versions = 0
        layer = manager.modules["mlp.gate_up_proj"]
        set_lora = layer.set_lora

        def copy(*args):
            if model.copy_fails:
                raise OSError("device lost")
            set_lora(*args)

        # Every adapter here has weights for the layer, so that the copy always comes by.
        monkeypatch.setattr(layer, "set_lora", copy)

    def new_weights(self):
        self.versions += 1
        while "mlp.up_proj" not in (weights := random_weights(self.rng.randrange(10**6))).pairs:
            pass
        return weights

    def operation(self, names):
        """A random operation as two calls: on the manager and on the model."""
        name, adapter_id = self.rng.choice(names), self.rng.choice(IDS)
        manager, model = self.manager, self.model
        if name == "add":
            weights = self.new_weights()
            ours = partial(manager.add_adapter, adapter_of(adapter_id, weights))
            theirs = partial(model.add, adapter_id, weights)
        elif name == "replace":
            weights = self.new_weights()
            ours = partial(manager.replace_adapter, adapter_of(adapter_id, weights))
            theirs = partial(model.replace, adapter_id, weights)
        elif name == "remove_oldest":
            ours, theirs = manager.remove_oldest_adapter, model.remove_oldest
        elif name == "in_use":
            in_use = frozenset(self.rng.sample(IDS, self.rng.choice([0, 1, 2])))
            ours, theirs = partial(setattr, manager, name, in_use), partial(setattr, model, name, in_use)
        else:
            ours = partial(getattr(manager, f"{name}_adapter"), adapter_id)
            theirs = partial(getattr(model, name), adapter_id)
        # A reload that fails half-way has a test of its own.
        model.copy_fails = name in ("activate", "pin") and self.rng.random() < 0.1
        return f"{name} {adapter_id}", ours, theirs

    def check(self, told):
        manager, model = self.manager, self.model
        assert manager.lora_index_to_id == model.slots, told
        assert manager.list_active_adapters() == {a: s for s, a in enumerate(model.slots) if a}, told
        assert list(manager.list_active_adapters()) == model.by_use(model.active()), told
        assert manager.get_free_slots() == [s for s, a in enumerate(model.slots) if a is None], told
        assert list(manager.list_adapters()) == model.by_use(model.memory), told
        assert len(manager) == len(model.memory), told
        assert manager.pinned_adapters == model.pins, told
        for slot, adapter_id in enumerate(model.slots):
            if adapter_id is not None:
                assert slot_holds(manager, slot, model.memory[adapter_id]), (told, slot)
        counted = manager.stats.evictions, manager.stats.cpu_evictions, manager.stats.activations
        assert counted == (model.evictions, model.drops, model.copies), told
        self.check_translation(told)

    def check_translation(self, told):
        """The same rows before and after: only the slot table can tell that something moved."""
        rows = tuple(sorted(self.model.active()))
        self.manager.set_adapter_mapping(LoRAMapping((0, *rows), rows))

        slots = [self.model.slots.index(adapter_id) for adapter_id in rows]
        assert self.manager.punica_wrapper.token_lora_indices.tolist() == [-1, *slots], told
        assert self.manager.punica_wrapper.sampler_indices.tolist() == slots, told


def outcome(call):
    try:
        return call()
    except OUTCOMES as error:
        return type(error)


def run(history, names, steps):
    told = []
    for _ in range(steps):
        text, ours, theirs = history.operation(names)
        told.append(text)

        assert outcome(ours) == outcome(theirs), told
        history.check(told)


@pytest.mark.parametrize(("slots", "memory"), [(1, 1), (2, 2), (2, 4), (3, 5)])
def test_the_evicting_manager_does_what_two_lists_do(slots, memory, monkeypatch):
    names = ["add"] * 4 + ["activate"] * 4 + ["deactivate", "remove", "touch", "remove_oldest"]
    names += ["pin", "unpin", "unpin", "replace", "in_use"]
    for seed in range(8):
        manager, model = make_manager(slots, memory), TwoTiers(slots, memory)

        run(History(manager, model, random.Random(seed), monkeypatch), names, steps=70)


@pytest.mark.parametrize(("slots", "memory"), [(1, 2), (3, 4)])
def test_the_plain_manager_does_what_two_lists_do_that_refuse(slots, memory, monkeypatch):
    names = ["add"] * 3 + ["activate"] * 3 + ["deactivate", "remove", "touch"]
    for seed in range(8):
        manager, model = make_plain_manager(slots, memory), TwoTiers(slots, memory, evicts=False)

        run(History(manager, model, random.Random(seed), monkeypatch), names, steps=50)
