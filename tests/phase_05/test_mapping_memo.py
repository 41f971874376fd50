"""The memo of a batch's mapping (lab 5.3): the same ids may sit in other slots than a step ago."""

import pytest
from small_model import make_adapter, make_manager

from minivllm.lora.layers import LoRAMapping

pytestmark = pytest.mark.lab("5.3")


def manager_with(*active, slots=2, memory=4):
    manager = make_manager(slots, memory)
    for adapter_id in range(1, memory + 1):
        manager.add_adapter(make_adapter(adapter_id))
    for adapter_id in active:
        manager.activate_adapter(adapter_id)
    return manager


def count_updates(monkeypatch, manager):
    calls = []
    update = manager.punica_wrapper.update_metadata

    def counted(mapping, lora_index_to_id, max_loras, vocab_size):
        calls.append((mapping, list(lora_index_to_id), max_loras, vocab_size))
        update(mapping, lora_index_to_id, max_loras, vocab_size)

    monkeypatch.setattr(manager.punica_wrapper, "update_metadata", counted)
    return calls


def test_rows_go_to_the_slots_that_their_adapters_are_in():
    manager = manager_with(3, 1)

    manager.set_adapter_mapping(LoRAMapping((1, 0, 3, 3), (0, 3)))

    assert manager.punica_wrapper.token_lora_indices.tolist() == [1, -1, 0, 0]
    assert manager.punica_wrapper.sampler_indices.tolist() == [-1, 0]


def test_a_slot_that_changed_hands_is_seen_though_the_mapping_is_the_same():
    """Incident 2: with the mapping alone as the key, adapter 1's rows would go to adapter 2's weights."""
    manager = manager_with(1, 2)
    mapping = LoRAMapping((1, 1, 2), (1, 2))
    manager.set_adapter_mapping(mapping)
    for adapter_id in (1, 2):
        manager.deactivate_adapter(adapter_id)
    for adapter_id in (2, 1):
        manager.activate_adapter(adapter_id)

    manager.set_adapter_mapping(LoRAMapping((1, 1, 2), (1, 2)))

    assert manager.lora_index_to_id == [2, 1]
    assert manager.punica_wrapper.token_lora_indices.tolist() == [1, 1, 0]


def test_an_adapter_that_left_its_slot_is_missed_though_the_mapping_is_the_same():
    manager = manager_with(1, 2)
    manager.set_adapter_mapping(LoRAMapping((1,), (1,)))
    manager.deactivate_adapter(1)

    with pytest.raises(ValueError, match=r"adapters \[1\] are in the batch but in no slot"):
        manager.set_adapter_mapping(LoRAMapping((1,), (1,)))


def test_a_step_like_the_last_translates_nothing(monkeypatch):
    manager = manager_with(1, 2)
    calls = count_updates(monkeypatch, manager)
    manager.set_adapter_mapping(LoRAMapping((1, 2), (1, 2)))

    manager.set_adapter_mapping(LoRAMapping([1, 2], [1, 2]))
    manager.activate_adapter(1)
    manager.set_adapter_mapping(LoRAMapping((1, 2), (1, 2)))

    assert len(calls) == 1


@pytest.mark.parametrize(
    "other",
    [
        LoRAMapping((2, 1), (1, 2)),
        LoRAMapping((1, 2), (1,)),
        LoRAMapping((1, 2), (1, 2), is_prefill=True),
    ],
)
def test_another_mapping_is_translated(monkeypatch, other):
    manager = manager_with(1, 2)
    calls = count_updates(monkeypatch, manager)
    manager.set_adapter_mapping(LoRAMapping((1, 2), (1, 2)))

    manager.set_adapter_mapping(other)

    assert [call[0] for call in calls] == [LoRAMapping((1, 2), (1, 2)), other]


def test_the_backend_is_told_the_table_one_more_than_the_slots_and_the_vocabulary(monkeypatch):
    """vLLM counts the base model as one more adapter."""
    manager = manager_with(3)
    calls = count_updates(monkeypatch, manager)
    mapping = LoRAMapping([], [])

    manager.set_adapter_mapping(mapping)

    assert calls == [(mapping, [3, None], 3, 97)]


def test_a_translation_that_failed_is_not_remembered():
    manager = manager_with(1)
    mapping = LoRAMapping((2,), (2,))
    for _ in range(2):
        with pytest.raises(ValueError, match="in no slot"):
            manager.set_adapter_mapping(mapping)

    manager.activate_adapter(2)
    manager.set_adapter_mapping(mapping)

    assert manager.punica_wrapper.token_lora_indices.tolist() == [1]
