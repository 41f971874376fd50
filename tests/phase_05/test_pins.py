"""Pins (lab 5.5): a pinned adapter keeps its slot and its place in memory, and a pin that fails leaves none."""

import pytest

from tests.worlds.managers import (
    adapter_of,
    assert_memory,
    assert_slot_holds,
    assert_slots,
    fail_copies,
    make_adapter,
    make_manager,
    random_weights,
    refusal,
)

pytestmark = pytest.mark.lab("5.5")


def manager_with(*adapter_ids, slots, memory, pinned=()):
    manager = make_manager(slots, memory)
    for adapter_id in adapter_ids:
        manager.add_adapter(make_adapter(adapter_id))
    for adapter_id in pinned:
        manager.pin_adapter(adapter_id)
    return manager


def assert_pinned(manager, expected, why):
    __tracebackhide__ = True
    found = manager.pinned_adapters
    assert found == expected, f"{why}\n  pinned expected {expected}\n  pinned found    {found}"


def test_pinning_brings_an_adapter_into_a_slot_and_evicts_if_it_must():
    weights = random_weights(9)
    manager = manager_with(1, slots=1, memory=2)
    manager.activate_adapter(1)
    manager.add_adapter(adapter_of(9, weights))

    assert manager.pin_adapter(9) is True, "a pin that succeeds is True"

    assert_slots(
        manager, [9], "9 was in memory alone, and the only slot was held by 1, which nothing keeps there"
    )
    assert_slot_holds(manager, 0, weights, "adapter 9")
    assert_pinned(manager, {9}, "9 was pinned")


def test_pinning_what_is_in_a_slot_copies_nothing():
    manager = manager_with(1, slots=2, memory=2, pinned=[1])

    assert manager.pin_adapter(1) is True, "a pin that is there already is True, too"

    assert manager.stats.activations == 1, "1 was in slot 0 when it was pinned again"
    assert_pinned(manager, {1}, "1 was pinned twice")


def test_a_pinned_adapter_keeps_its_slot_and_its_place_in_memory():
    manager = manager_with(1, 2, 3, slots=2, memory=3, pinned=[1])

    manager.activate_adapter(2)
    manager.activate_adapter(3)
    manager.add_adapter(make_adapter(4))
    manager.add_adapter(make_adapter(5))

    assert_slots(manager, [1, None], "1 is pinned, so 2 made room for 3, which left memory for 5")
    assert_memory(manager, [1, 4, 5], "1 is pinned, so 2 makes room for 4, and 3 for 5")


def test_an_unknown_id_cannot_be_pinned():
    manager = manager_with(1, slots=1, memory=1)

    with pytest.raises(ValueError, match="7"):
        manager.pin_adapter(7)

    assert_pinned(manager, set(), "7 is not registered")


@pytest.mark.parametrize("why", ["pinned", "in use"])
def test_a_pin_that_finds_no_slot_leaves_the_adapter_unpinned_everywhere(why):
    """Incident 20: memory would otherwise never let go of an adapter that nobody calls pinned."""
    manager = manager_with(1, 2, slots=1, memory=2, pinned=[1] if why == "pinned" else [])
    manager.activate_adapter(1)
    manager.set_in_use([1] if why == "in use" else [])

    with refusal(RuntimeError, f"1 is {why} and holds the only slot, so 2 cannot be pinned"):
        manager.pin_adapter(2)

    pinned = {1} if why == "pinned" else set()
    assert_pinned(manager, pinned, f"1 is {why} and holds the only slot, so 2 could not be pinned")
    manager.add_adapter(make_adapter(3))
    assert_memory(manager, [1, 3], "the pin of 2 failed, so 2 may go from memory")


def test_a_pin_whose_copy_fails_leaves_the_adapter_unpinned_everywhere(monkeypatch):
    manager = manager_with(1, slots=1, memory=1)
    fail_copies(monkeypatch, manager)

    with pytest.raises(OSError, match="device lost"):
        manager.pin_adapter(1)

    assert_pinned(manager, set(), "the copy of 1 failed, so it is in no slot and not pinned")
    assert manager.remove_oldest_adapter(), "the pin of 1 failed, so 1 may go from memory"


def test_with_all_slots_pinned_no_other_adapter_gets_in():
    manager = manager_with(1, 2, 3, slots=2, memory=3, pinned=[1, 2])

    with refusal(RuntimeError, "1 and 2 are pinned, so 3 cannot have a slot"):
        manager.activate_adapter(3)

    assert_slots(manager, [1, 2], "both are pinned")


def test_an_unpinned_adapter_may_go_from_slot_and_memory():
    manager = manager_with(1, 2, slots=1, memory=2, pinned=[1])

    assert manager.unpin_adapter(1) is True, "1 was pinned: True"
    assert manager.unpin_adapter(1) is False, "1 was not pinned any more: False"
    assert manager.unpin_adapter(7) is False, "7 is not even known: False"

    assert_slots(manager, [1], "unpinned it may go, but nobody needs its slot yet")
    manager.activate_adapter(2)
    assert_slots(manager, [2], "1 is not pinned any more and makes room for 2")
    manager.add_adapter(make_adapter(3))
    assert_memory(manager, [2, 3], "1 is not pinned any more and makes room for 3")


@pytest.mark.parametrize("leave", ["deactivate_adapter", "remove_adapter"])
def test_a_pin_ends_with_the_stay_in_the_slot(leave):
    manager = manager_with(1, 2, slots=1, memory=2, pinned=[1])

    assert getattr(manager, leave)(1)

    assert_pinned(manager, set(), f"1 was pinned before {leave}(1)")
    manager.add_adapter(adapter_of(1, random_weights(5)))
    manager.activate_adapter(1)
    manager.activate_adapter(2)
    assert_slots(manager, [2], f"the pin of 1 ended with {leave}(1), so the new 1 makes room for 2")


def test_remove_all_asks_no_pin():
    manager = manager_with(1, 2, 3, slots=2, memory=3, pinned=[1, 2])

    manager.remove_all_adapters()

    assert_memory(manager, [], "all adapters were removed")
    assert_slots(manager, [None, None], "all adapters were removed")
    assert_pinned(manager, set(), "all adapters were removed")
