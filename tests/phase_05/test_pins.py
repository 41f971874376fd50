"""Pins (lab 5.5): a pinned adapter keeps its slot and its place in memory, and a pin that fails leaves none."""

import pytest
from small_model import (
    adapter_of,
    fail_copies,
    make_adapter,
    make_manager,
    make_plain_manager,
    random_weights,
)

pytestmark = pytest.mark.lab("5.5")


def manager_with(*adapter_ids, slots, memory, pinned=()):
    manager = make_manager(slots, memory)
    for adapter_id in adapter_ids:
        manager.add_adapter(make_adapter(adapter_id))
    for adapter_id in pinned:
        manager.pin_adapter(adapter_id)
    return manager


def test_pinning_brings_an_adapter_into_a_slot():
    manager = manager_with(1, 2, slots=1, memory=2)

    assert manager.pin_adapter(1)

    assert manager.lora_index_to_id == [1]
    assert manager.pinned_adapters == {1}


def test_a_pinned_adapter_keeps_its_slot():
    manager = manager_with(1, 2, 3, slots=2, memory=3, pinned=[1])

    manager.activate_adapter(2)
    manager.activate_adapter(3)

    assert manager.lora_index_to_id == [1, 3]


def test_a_pinned_adapter_keeps_its_place_in_memory():
    manager = manager_with(1, 2, slots=1, memory=2, pinned=[1])

    manager.add_adapter(make_adapter(3))
    manager.add_adapter(make_adapter(4))

    assert set(manager.list_adapters()) == {1, 4}
    assert manager.lora_index_to_id == [1]


def test_an_unknown_id_cannot_be_pinned():
    manager = manager_with(1, slots=1, memory=1)

    with pytest.raises(ValueError, match="LoRA 7 is not registered"):
        manager.pin_adapter(7)

    assert manager.pinned_adapters == set()


def test_a_pin_that_finds_no_slot_leaves_the_adapter_unpinned_everywhere():
    """Incident 20: memory would otherwise never let go of an adapter that nobody calls pinned."""
    manager = manager_with(1, 2, slots=1, memory=2, pinned=[1])

    with pytest.raises(RuntimeError, match="pinned or in use"):
        manager.pin_adapter(2)

    assert manager.pinned_adapters == {1}
    manager.add_adapter(make_adapter(3))
    assert set(manager.list_adapters()) == {1, 3}


def test_a_pin_whose_copy_fails_leaves_the_adapter_unpinned_everywhere(monkeypatch):
    manager = manager_with(1, slots=1, memory=1)
    fail_copies(monkeypatch, manager)

    with pytest.raises(OSError, match="device lost"):
        manager.pin_adapter(1)

    assert manager.pinned_adapters == set()
    assert manager.remove_oldest_adapter()


def test_with_all_slots_pinned_no_other_adapter_gets_in():
    manager = manager_with(1, 2, 3, slots=2, memory=3, pinned=[1, 2])

    with pytest.raises(RuntimeError, match="pinned or in use"):
        manager.activate_adapter(3)

    assert manager.lora_index_to_id == [1, 2]


def test_an_unpinned_adapter_may_go_from_slot_and_memory():
    manager = manager_with(1, 2, slots=1, memory=2, pinned=[1])

    assert manager.unpin_adapter(1)
    assert not manager.unpin_adapter(1)
    assert not manager.unpin_adapter(7)

    manager.activate_adapter(2)
    assert manager.lora_index_to_id == [2]
    manager.add_adapter(make_adapter(3))
    assert set(manager.list_adapters()) == {2, 3}


@pytest.mark.parametrize("leave", ["deactivate_adapter", "remove_adapter"])
def test_a_pin_ends_with_the_stay_in_the_slot(leave):
    manager = manager_with(1, 2, slots=1, memory=2, pinned=[1])

    assert getattr(manager, leave)(1)

    assert manager.pinned_adapters == set()
    manager.add_adapter(adapter_of(1, random_weights(5)))
    manager.activate_adapter(1)
    manager.activate_adapter(2)
    assert manager.lora_index_to_id == [2]  # an old pin would have kept 1 here


def test_remove_all_asks_no_pin():
    manager = manager_with(1, 2, 3, slots=2, memory=3, pinned=[1, 2])

    manager.remove_all_adapters()

    assert (manager.list_adapters(), manager.lora_index_to_id) == ({}, [None, None])
    assert manager.pinned_adapters == set()


def test_the_plain_manager_knows_no_pins():
    manager = make_plain_manager(slots=1)
    manager.add_adapter(make_adapter(1))

    with pytest.raises(NotImplementedError, match="LRUCacheLoRAModelManager"):
        manager.pin_adapter(1)

    assert manager.pinned_adapters == set()
