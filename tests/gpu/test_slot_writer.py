"""What a GPU writes slots with: one table, one piece of memory and one launch an adapter.

Without a GPU the kernel runs through Triton's interpreter; the order of streams is then not verified here.
"""

from types import SimpleNamespace

import pytest
import torch

from minivllm.config import LoRAConfig
from minivllm.gpu.slot_writer import SlotWriter
from minivllm.lora.lora_model import LoRAModel
from minivllm.vllm.model_manager import LRUCacheLoRAModelManager
from minivllm.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from tests.tools.device import DEVICE, needs_cuda
from tests.tools.memory import ScatteredSlots
from tests.worlds.managers import (
    RANK,
    SLICES,
    SmallModel,
    adapter_of,
    expected_slot,
    make_adapter,
    random_weights,
)


def make_manager(slots=3, memory=8, backend="grouped", place=None):
    config = LoRAConfig(max_lora_rank=RANK, max_loras=slots, max_cpu_loras=memory, punica_backend=backend)
    manager = LRUCacheLoRAModelManager(SmallModel().to(DEVICE), 8, 64, 97, config, DEVICE)
    for module in manager.modules.values() if place else ():
        module.slots = place(module.slots, None)
    manager.slot_writer = SlotWriter(manager.wrapped, DEVICE)
    return manager


def contents(manager, slot):
    """(module, slice) -> A (R, K), B (N, R) that a slot holds."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    layers = manager.modules
    return {
        (name, i): (
            layers[name].lora_a_stacked[i][slot, 0].cpu(),
            layers[name].lora_b_stacked[i][slot, 0].cpu(),
        )
        for name, slices in SLICES.items()
        for i in range(len(slices))
    }


def assert_slot_holds(manager, slot, weights):
    expected, found = expected_slot(weights), contents(manager, slot)
    for key, pair in expected.items():
        for side, want, got in zip("AB", pair, found[key]):
            assert torch.equal(got, want), f"{side} of {key} in slot {slot}:\n{got}\nexpected\n{want}"
    for module, slices in SLICES.items():
        ranks = [slot_ranks[slot] for slot_ranks in manager.modules[module].slots.live_ranks]
        assert ranks == [weights.rank if name in weights.pairs else 0 for name, _, _ in slices]


@pytest.mark.parametrize("backend", ["grouped", "loops", "triton"])
def test_a_slot_holds_the_adapter_and_zeros_past_its_ranks(backend):
    manager = make_manager(backend=backend)
    weights = {adapter_id: random_weights(adapter_id) for adapter_id in range(1, 9)}

    for adapter_id, of_adapter in weights.items():
        manager.add_adapter(adapter_of(adapter_id, of_adapter))
        manager.activate_adapter(adapter_id)

    for slot, adapter_id in enumerate(manager.lora_index_to_id):
        assert_slot_holds(manager, slot, weights[adapter_id])


@pytest.mark.skipif(DEVICE == "cuda", reason="scattered slots are made on the CPU")
def test_buffers_may_lie_anywhere():
    weights = random_weights(5)
    manager = make_manager(backend="loops", place=ScatteredSlots(torch.float32).place)
    manager.add_adapter(adapter_of(5, weights))

    manager.activate_adapter(5)

    assert_slot_holds(manager, 0, weights)


def test_tensors_of_an_adapter_that_was_taken_are_what_they_were():
    manager = make_manager()
    adapter, same = adapter_of(3, random_weights(3)), adapter_of(3, random_weights(3))
    manager.wrapped.accept(same)

    manager.add_adapter(adapter)

    for name, weights in same.loras.items():
        pairs = zip([*_as_list(weights.lora_a), *_as_list(weights.lora_b)], _tensors(adapter.get_lora(name)))
        for want, got in pairs:
            assert (want is None and got is None) or torch.equal(want, got)
            assert (
                got is None
                or got.untyped_storage().data_ptr() == manager.slot_writer.pools[adapter].data_ptr()
            )


def _tensors(weights):
    return [*_as_list(weights.lora_a), *_as_list(weights.lora_b)]


def _as_list(tensors):
    return tensors if isinstance(tensors, list) else [tensors]


def test_an_adapter_that_was_staged_beside_steps_is_not_moved_again():
    manager = make_manager()
    weights = random_weights(3)
    adapter = adapter_of(7, weights)
    manager.wrapped.accept(adapter)

    manager.slot_writer.stage(adapter)
    pool = manager.slot_writer.pools[adapter]
    manager.add_adapter(adapter)
    manager.activate_adapter(7)

    assert manager.slot_writer.pools[adapter] is pool
    assert_slot_holds(manager, manager.list_active_adapters()[7], weights)


def test_an_adapter_that_has_nothing_leaves_zeros():
    manager = make_manager(slots=1)
    manager.add_adapter(make_adapter(3))
    manager.activate_adapter(3)
    manager.add_adapter(LoRAModel(7, RANK, {}))

    manager.activate_adapter(7)

    assert manager.lora_index_to_id == [7]
    assert not any(side.any() for pair in contents(manager, 0).values() for side in pair)


def test_an_adapter_of_another_dtype_is_converted():
    weights = random_weights(4)
    adapter = adapter_of(4, weights)
    for of_module in adapter.loras.values():
        of_module.replace_tensors(torch.Tensor.double)
    manager = make_manager()
    manager.add_adapter(adapter)

    manager.activate_adapter(4)

    assert contents(manager, 0)["attn.o_proj", 0][0].dtype == torch.float32
    for (module, i), pair in expected_slot(weights).items():
        for want, got in zip(pair, contents(manager, 0)[module, i]):
            torch.testing.assert_close(got, want)


def runner_of(manager):
    runner = LoRAModelRunnerMixin()
    runner.worker_manager = SimpleNamespace(manager=manager)
    return runner


class TestPrefetch:
    def test_brings_an_adapter_into_a_slot(self):
        manager = make_manager(slots=1)
        weights = random_weights(1)
        manager.add_adapter(adapter_of(1, weights))
        runner = runner_of(manager)
        assert runner.can_prefetch_lora(1)

        runner.prefetch_lora(1)

        assert_slot_holds(manager, 0, weights)
        assert not runner.can_prefetch_lora(1)

    def test_does_nothing_when_the_running_step_uses_all_slots(self):
        manager = make_manager(slots=1)
        for adapter_id in (1, 2):
            manager.add_adapter(make_adapter(adapter_id))
        manager.activate_adapter(1)
        manager.set_in_use({1})

        runner_of(manager).prefetch_lora(2)

        assert manager.lora_index_to_id == [1]

    def test_of_an_adapter_that_cannot_be_copied_leaves_the_running_step_alone(self, monkeypatch):
        manager = make_manager(slots=1)
        manager.add_adapter(make_adapter(1))

        def fail(adapter, slot):
            raise RuntimeError("no copy")

        with monkeypatch.context() as patched:
            patched.setattr(manager, "write_slot", fail)
            runner_of(manager).prefetch_lora(1)

        assert runner_of(manager).can_prefetch_lora(1), "so the step that needs it tries again, and tells"

    def test_is_for_adapters_in_memory_alone(self):
        assert not runner_of(make_manager()).can_prefetch_lora(1)


@needs_cuda
class TestOrder:
    """A long kernel stands in for a step; a slot must not change under it, nor be read before it is written."""

    def busy(self):
        torch.cuda._sleep(200_000_000)

    def test_a_write_waits_for_all_that_was_launched_before(self):
        manager, old, new = self.two_adapters()
        layer = manager.modules["attn.o_proj"]
        self.busy()
        seen = layer.lora_a_stacked[0][0, 0].clone()

        manager.activate_adapter(2)

        torch.cuda.synchronize()
        assert torch.equal(seen.cpu(), expected_slot(old)["attn.o_proj", 0][0])
        assert_slot_holds(manager, 0, new)

    def test_behind_a_step_it_does_not(self):
        manager, _, new = self.two_adapters()
        manager.slot_writer.begin_step([1], {1: 0})
        self.busy()

        with manager.slot_writer.behind_step():
            manager.activate_adapter(2)

        written = manager.slot_writer.written[0]
        written.synchronize()
        assert not torch.cuda.current_stream().query(), "the step should be running still"
        assert_slot_holds(manager, 0, new)

    def test_what_waits_for_the_slot_finds_it_written(self):
        manager, _, new = self.two_adapters()
        with torch.cuda.stream(manager.slot_writer._stream):
            self.busy()
        manager.activate_adapter(2)

        manager.slot_writer.begin_step([0, 2], manager.list_active_adapters())
        seen = manager.modules["attn.o_proj"].lora_a_stacked[0][0, 0].clone()

        assert torch.equal(seen.cpu(), expected_slot(new)["attn.o_proj", 0][0])

    def two_adapters(self):
        manager = make_manager(slots=1)
        weights = [full_weights(1), full_weights(2)]
        for adapter_id, of_adapter in enumerate(weights, start=1):
            manager.add_adapter(adapter_of(adapter_id, of_adapter))
        manager.activate_adapter(1)
        torch.cuda.synchronize()
        return manager, *weights


def full_weights(seed):
    """An adapter that has something in every module."""
    while len((weights := random_weights(seed)).pairs) < 5 or "attn.o_proj" not in weights.pairs:
        seed += 100
    return weights
