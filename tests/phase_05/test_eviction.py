"""Who has to go when memory or slots are full (lab 5.4). Any order of events is in test_tier_histories."""

import pytest

from minivllm.config import LoRAConfig
from minivllm.lora.lru_cache import LRUCache
from minivllm.lora.tiers import AdapterTiers
from tests.worlds.managers import (
    adapter_of,
    assert_memory,
    assert_slot_holds,
    assert_slots,
    make_adapter,
    make_manager,
    random_weights,
    refusal,
)

pytestmark = pytest.mark.lab("5.4")


def manager_with(*adapter_ids, slots, memory, active=(), pinned=()):
    manager = make_manager(slots, memory)
    for adapter_id in adapter_ids:
        manager.add_adapter(make_adapter(adapter_id))
    for adapter_id in active:
        manager.activate_adapter(adapter_id)
    for adapter_id in pinned:
        manager.pin_adapter(adapter_id)
    return manager


def test_a_copy_of_the_tables_is_nobody_elses():
    manager = manager_with(1, slots=1, memory=1, active=(1,))

    manager.list_adapters().clear()
    manager.list_active_adapters().clear()

    assert_memory(manager, [1], "1 is in memory, whatever is done to a list of who is there")
    assert_slots(manager, [1], "1 is in a slot, whatever is done to a list of who is there")


# What happens, with how many slots and places in memory and who is in use; who is in slots and in memory then, and why.
WHO_GOES = {
    "the slot of the one used longest ago": (
        ["add 1 2 3", "activate 1 2 1", "activate 3"],
        (2, 3, ()),
        ([1, 3], [1, 2, 3], "1, 2, 1 were activated: 2 makes room for 3, and stays in memory"),
    ),
    "from memory the one used longest ago": (
        ["add 1 2 1", "add 3"],
        (2, 2, ()),
        ([None, None], [1, 3], "1, 2, 1 were added, which is a use: 2 makes room for 3"),
    ),
    "nobody where there is room": (
        ["add 1 2", "activate 1", "activate 2", "add 3"],
        (2, 3, ()),
        ([1, 2], [1, 2, 3], "slot 1 was free for 2, and memory has room for three"),
    ),
    "each tier has an order of its own": (
        ["add 1 2 3", "activate 3", "add 1 2", "activate 1"],
        (1, 3, ()),
        ([1], [1, 2, 3], "only 3 was in a slot, so 3 makes room for 1; no place in memory was needed"),
    ),
    "in use, they keep their slots however old": (
        ["add 1 2 3 4", "activate 1 2 3", "activate 4"],
        (3, 4, (1, 2, 4)),
        ([1, 2, 4], [1, 2, 3, 4], "1 and 2 are in use, so 3 makes room for 4"),
    ),
    "in use, they stay in memory however old": (
        ["add 1 2 3", "add 4"],
        (1, 3, (1, 2)),
        ([None], [1, 2, 4], "1 and 2 are in use, so 3 makes room for 4"),
    ),
    "pinned, they stay in slot and memory": (
        ["add 1 2 3", "activate 2", "pin 1", "activate 2", "add 2 3", "activate 3", "add 4"],
        (2, 3, ()),
        ([3, 1], [1, 3, 4], "1 is pinned though the oldest, so 2 makes room for 3 and then for 4"),
    ),
}


@pytest.mark.parametrize("case", WHO_GOES)
def test_who_goes(case):
    history, (slots, memory, in_use), (in_slots, in_memory, why) = WHO_GOES[case]
    manager = make_manager(slots, memory)
    calls = {"activate": manager.activate_adapter, "pin": manager.pin_adapter}
    calls["add"] = lambda adapter_id: manager.add_adapter(make_adapter(adapter_id))

    for step in history:
        what, *adapter_ids = step.split()
        if step is history[-1]:
            manager.set_in_use(in_use)
        for adapter_id in adapter_ids:
            calls[what](int(adapter_id))

    assert_slots(manager, in_slots, why)
    assert_memory(manager, in_memory, why)
    if case == "nobody where there is room":
        assert (manager.stats.evictions, manager.stats.cpu_evictions) == (0, 0), why


class ForgetsTheNewest(LRUCache):
    """A cache with another order than use: what came last goes first."""

    def remove_oldest(self, spare=()):
        victim = next(key for key in reversed(self) if key not in spare)
        return victim, self.pop(victim)


def test_each_tiers_cache_says_who_goes():
    """The tiers are given their caches (`make_cache`): another policy is another cache, and no other tiers."""
    config = LoRAConfig(max_lora_rank=8, max_loras=2, max_cpu_loras=3)
    tiers = AdapterTiers(config, make_cache=lambda capacity, get_adapter: ForgetsTheNewest(capacity))
    for slot, adapter_id in enumerate((1, 2)):
        tiers.memory.put(adapter_id, make_adapter(adapter_id))
        tiers.slots.put(adapter_id, slot)

    slot = tiers.find_slot()
    tiers.memory.put(3, make_adapter(3))
    tiers.make_room_in_memory()

    assert (slot, dict(tiers.slots)) == (1, {1: 0}), "2 came last, so its cache gives its slot away"
    assert list(tiers.memory) == [1, 2], "3 came last, so its cache drops it"


def test_looking_at_an_adapter_is_no_use():
    manager = manager_with(1, 2, slots=2, memory=2)

    manager.get_adapter(1)
    manager.list_adapters()[1]
    manager.get_lora_info(1)
    assert manager.remove_oldest_adapter() is True, "an adapter was dropped: True"

    assert_memory(manager, [2], "1 was only looked at, so it is the oldest")


def test_what_leaves_memory_leaves_its_slot():
    """Its id may come back with other weights: the slot's would be served in their name."""
    manager = manager_with(1, 2, slots=2, memory=2, active=(1, 2))
    manager.add_adapter(make_adapter(3))
    assert_slots(manager, [None, 2], "1 made room in memory for 3, so it leaves its slot")

    other_weights = random_weights(77)
    manager.add_adapter(adapter_of(1, other_weights))
    manager.activate_adapter(1)

    slot = manager.lora_index_to_id.index(1)
    assert_slot_holds(manager, slot, other_weights, "adapter 1 as it came back")


def test_where_all_are_in_use_nobody_goes():
    manager = manager_with(1, 2, 3, slots=2, memory=3, active=(1, 2))
    manager.set_in_use({1, 2, 3})

    with refusal(RuntimeError, "1 and 2 are in use, so 3 cannot have a slot"):
        manager.activate_adapter(3)
    with refusal(RuntimeError, "1, 2 and 3 are in use, so memory has no room for 4"):
        manager.add_adapter(make_adapter(4))
    with refusal(RuntimeError, "1, 2 and 3 are in use, so no oldest may go"):
        manager.remove_oldest_adapter()

    assert_slots(manager, [1, 2], "all are in use")
    assert_memory(manager, [1, 2, 3], "all are in use")


def test_evictions_and_drops_are_counted_apart():
    manager = manager_with(1, 2, 3, slots=2, memory=3, active=(1, 2))
    manager.stats.drain_events()

    manager.activate_adapter(3)  # 1 loses its slot
    manager.add_adapter(make_adapter(4))  # 1 its place in memory
    manager.add_adapter(make_adapter(5))  # 2 both

    counted = [(event.kind, event.adapter_id, event.slot) for event in manager.stats.drain_events()]
    expected = [("evict", 1, 0), ("activate", 3, 0), ("drop", 1, None), ("evict", 2, 1), ("drop", 2, None)]
    assert sorted(counted, key=str) == sorted(expected, key=str), "events, sorted: what, adapter, slot"


def test_an_adapter_that_does_not_fit_evicts_nobody():
    """Incident 14, for weights that are in memory already."""
    manager = manager_with(1, 2, slots=2, memory=2, active=(1, 2))
    wide = make_adapter(3)
    for lora in wide.loras.values():
        lora.lora_a = lora.lora_a.repeat(1, 2)

    with pytest.raises(ValueError, match="expected"):
        manager.add_adapter(wide)

    assert_slots(manager, [1, 2], "3 does not fit the model")
    assert_memory(manager, [1, 2], "3 does not fit the model")


def test_there_is_no_oldest_in_an_empty_memory():
    manager = make_manager(slots=1)

    assert manager.remove_oldest_adapter() is False, "memory is empty: False"
