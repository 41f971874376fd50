"""Into a slot (lab 5.2), against the adapter's own A and B. Empty and failed slots name nobody."""

import pytest
import torch
from small_model import (
    SmallModel,
    adapter_of,
    fail_copies,
    make_adapter,
    make_manager,
    make_plain_manager,
    random_weights,
    slot_holds,
)
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.model_manager import LoRAModelManager, create_lora_manager

pytestmark = pytest.mark.lab("5.2")


def test_a_new_manager_has_empty_slots_only():
    manager = make_plain_manager(slots=3)

    assert manager.lora_index_to_id == [None, None, None]
    assert all(slot_holds(manager, slot, None) for slot in range(3))


def test_every_slot_holds_the_weights_of_its_own_adapter():
    weights = {adapter_id: random_weights(adapter_id) for adapter_id in (4, 9, 2)}
    manager = make_plain_manager(slots=3)

    for adapter_id in weights:
        manager.add_adapter(adapter_of(adapter_id, weights[adapter_id]))
        assert manager.activate_adapter(adapter_id)

    assert manager.lora_index_to_id == [4, 9, 2]
    assert manager.list_active_adapters() == {4: 0, 9: 1, 2: 2}
    for slot, adapter_id in enumerate(manager.lora_index_to_id):
        assert slot_holds(manager, slot, weights[adapter_id])


@pytest.mark.parametrize("backend", ["loops", "grouped"])
def test_the_next_adapter_in_a_slot_keeps_nothing_of_the_last(backend):
    weights = {adapter_id: random_weights(adapter_id) for adapter_id in range(1, 9)}
    manager = make_manager(slots=1, memory=8, punica_backend=backend)
    for adapter_id in weights:
        manager.add_adapter(adapter_of(adapter_id, weights[adapter_id]))

    for adapter_id in (1, 2, 3, 4, 5, 6, 7, 8, 1, 5):
        manager.activate_adapter(adapter_id)

        assert slot_holds(manager, 0, weights[adapter_id])


def test_the_first_free_slot_is_taken():
    manager = make_plain_manager(slots=3, memory=4)
    for adapter_id in (1, 2, 3, 4):
        manager.add_adapter(make_adapter(adapter_id))
    for adapter_id in (1, 2, 3):
        manager.activate_adapter(adapter_id)
    manager.deactivate_adapter(3)
    manager.deactivate_adapter(2)

    manager.activate_adapter(4)

    assert manager.lora_index_to_id == [1, 4, None]
    assert manager.get_free_slots() == [2]


def test_an_adapter_that_is_in_a_slot_is_not_copied_again(monkeypatch):
    manager = make_plain_manager(slots=2)
    manager.add_adapter(make_adapter(1))
    manager.activate_adapter(1)
    fail_copies(monkeypatch, manager)

    assert not manager.activate_adapter(1)

    assert manager.stats.activations == 1


def test_the_plain_manager_refuses_when_no_slot_is_free():
    manager = make_plain_manager(slots=1, memory=2)
    manager.add_adapter(make_adapter(1))
    manager.add_adapter(make_adapter(2))
    manager.activate_adapter(1)

    with pytest.raises(ValueError, match="No free lora slots"):
        manager.activate_adapter(2)

    assert manager.lora_index_to_id == [1]


def test_a_failed_copy_leaves_the_slot_free_and_the_adapter_inactive(monkeypatch):
    """Incident 4: the table must not name an adapter whose weights are not, or only partly, there."""
    manager = make_manager(slots=2)
    manager.add_adapter(make_adapter(1, seed=1))
    fail_copies(monkeypatch, manager)

    with pytest.raises(OSError, match="device lost"):
        manager.activate_adapter(1)

    assert manager.lora_index_to_id == [None, None]
    assert manager.list_active_adapters() == {}
    assert manager.stats.activations == 0
    assert slot_holds(manager, 0, None)


def test_after_a_failed_copy_the_next_attempt_succeeds(monkeypatch):
    weights = random_weights(1)
    manager = make_manager(slots=1)
    manager.add_adapter(adapter_of(1, weights))
    with monkeypatch.context() as broken:
        fail_copies(broken, manager)
        with pytest.raises(OSError, match="device lost"):
            manager.activate_adapter(1)

    assert manager.activate_adapter(1)

    assert manager.lora_index_to_id == [1]
    assert slot_holds(manager, 0, weights)


@pytest.mark.parametrize("make", [make_plain_manager, make_manager])
def test_an_unknown_id_is_refused_before_anybody_is_evicted_for_it(make):
    """Incident 21."""
    weights = random_weights(1)
    manager = make(slots=1)
    manager.add_adapter(adapter_of(1, weights))
    manager.activate_adapter(1)

    with pytest.raises(ValueError, match="adapter 7 is not registered"):
        manager.activate_adapter(7)

    assert manager.lora_index_to_id == [1]
    assert slot_holds(manager, 0, weights)
    assert manager.stats.evictions == 0


def test_slots_of_another_dtype_take_what_the_adapter_rounds_to():
    weights = random_weights(3)
    manager = make_plain_manager(slots=1)
    half = make_manager(slots=1, lora_dtype="bfloat16")
    manager.add_adapter(adapter_of(1, weights))
    half.add_adapter(adapter_of(1, weights))

    manager.activate_adapter(1)
    half.activate_adapter(1)

    assert (manager.lora_dtype, half.lora_dtype) == (torch.float32, torch.bfloat16)
    for name, layer in manager.modules.items():
        for full, rounded in zip(layer.lora_b_stacked, half.modules[name].lora_b_stacked):
            assert torch.equal(full.to(torch.bfloat16), rounded)


def test_a_model_without_the_marker_is_refused():
    class Unmarked(nn.Sequential):
        pass

    with pytest.raises(ValueError, match="Model Unmarked is not supported for LoRA"):
        LoRAModelManager(Unmarked(), 1, 1, 1, LoRAConfig(), "cpu")


def test_create_lora_manager_wraps_the_model_once_and_keeps_it():
    model = SmallModel()

    manager = create_lora_manager(
        model,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        vocab_size=97,
        lora_config=LoRAConfig(max_loras=2, max_cpu_loras=3),
        vllm_config=None,
        device=torch.device("cpu"),
    )

    assert manager.model is model
    assert (manager.lora_slots, manager.capacity, len(manager)) == (2, 3, 0)
    assert manager.modules["attn.qkv_proj"] is model.attn.qkv_proj
    assert sorted(manager.supported_lora_modules) == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
