"""Who has to go when memory or slots are full (lab 5.4). Any order of events is in test_manager_histories."""

import pytest
from small_model import adapter_of, make_adapter, make_manager, make_plain_manager, random_weights, slot_holds
from tiers_model import TwoTiers

pytestmark = pytest.mark.lab("5.4")


def manager_with(*adapter_ids, slots, memory, active=()):
    manager = make_manager(slots, memory)
    for adapter_id in adapter_ids:
        manager.add_adapter(make_adapter(adapter_id))
    for adapter_id in active:
        manager.activate_adapter(adapter_id)
    return manager


def test_the_slot_of_the_adapter_used_longest_ago_is_given_away():
    manager = manager_with(1, 2, 3, slots=2, memory=3, active=(1, 2))
    manager.activate_adapter(1)  # 1 came first, but 2 was used longer ago

    manager.activate_adapter(3)

    assert manager.lora_index_to_id == [1, 3]
    assert set(manager.list_adapters()) == {1, 2, 3}  # out of its slot, not out of memory


def test_the_adapter_used_longest_ago_leaves_memory():
    manager = manager_with(1, 2, slots=2, memory=2)
    assert not manager.add_adapter(make_adapter(1))  # known: that is a use

    assert manager.add_adapter(make_adapter(3))

    assert set(manager.list_adapters()) == {1, 3}


def test_being_put_into_a_slot_counts_as_use_in_memory_too():
    manager = manager_with(1, 2, slots=2, memory=2, active=(2, 1))

    manager.add_adapter(make_adapter(3))

    assert set(manager.list_adapters()) == {1, 3}


def test_looking_at_an_adapter_is_no_use():
    manager = manager_with(1, 2, slots=2, memory=2)

    manager.get_adapter(1)
    manager.list_adapters()[1]
    manager.get_lora_info(1)
    manager.remove_oldest_adapter()

    assert set(manager.list_adapters()) == {2}


def test_what_leaves_memory_leaves_its_slot():
    """Its id may come back with other weights: the slot's would be served in their name."""
    manager = manager_with(1, 2, slots=2, memory=2, active=(1, 2))
    manager.add_adapter(make_adapter(3))
    assert manager.lora_index_to_id == [None, 2]

    other_weights = random_weights(77)
    manager.add_adapter(adapter_of(1, other_weights))
    manager.activate_adapter(1)

    assert slot_holds(manager, manager.lora_index_to_id.index(1), other_weights)


def test_adapters_in_use_keep_their_slots_however_old():
    manager = manager_with(1, 2, 3, 4, slots=3, memory=4, active=(1, 2, 3))
    manager.in_use = frozenset({1, 2, 4})

    manager.activate_adapter(4)

    assert manager.lora_index_to_id == [1, 2, 4]


def test_adapters_in_use_stay_in_memory_however_old():
    manager = manager_with(1, 2, 3, slots=1, memory=3)
    manager.in_use = frozenset({1, 2})

    manager.add_adapter(make_adapter(4))

    assert set(manager.list_adapters()) == {1, 2, 4}


def test_where_all_are_in_use_nobody_goes():
    manager = manager_with(1, 2, 3, slots=2, memory=3, active=(1, 2))
    manager.in_use = frozenset({1, 2, 3})

    with pytest.raises(RuntimeError, match=r"pinned or in use.*\[1, 2"):
        manager.activate_adapter(3)
    with pytest.raises(RuntimeError, match="pinned or in use"):
        manager.add_adapter(make_adapter(4))
    with pytest.raises(RuntimeError, match="pinned or in use"):
        manager.remove_oldest_adapter()

    assert manager.lora_index_to_id == [1, 2]
    assert set(manager.list_adapters()) == {1, 2, 3}


def test_an_adapter_that_does_not_fit_evicts_nobody():
    """Incident 14, for weights that are in memory already."""
    manager = manager_with(1, 2, slots=2, memory=2, active=(1, 2))
    wide = make_adapter(3)
    for lora in wide.loras.values():
        lora.lora_a = lora.lora_a.repeat(1, 2)

    with pytest.raises(ValueError, match="expected"):
        manager.add_adapter(wide)

    assert manager.lora_index_to_id == [1, 2]
    assert set(manager.list_adapters()) == {1, 2}


def test_the_plain_manager_refuses_where_the_other_evicts():
    manager = make_plain_manager(slots=1, memory=1)
    manager.add_adapter(make_adapter(1))

    with pytest.raises(RuntimeError, match="No free adapter slots"):
        manager.add_adapter(make_adapter(2))

    assert set(manager.list_adapters()) == {1}


def test_there_is_no_oldest_in_an_empty_memory():
    manager = make_manager(slots=1)

    assert manager.remove_oldest_adapter() is False


def test_room_is_promised_exactly_when_a_slot_can_be_had():
    for pins in ((), (1,), (2,), (1, 2)):
        for in_use in (set(), {1}, {2}, {1, 2}, {1, 3}):
            for active in ((), (1,), (1, 2)):
                manager = manager_with(1, 2, 3, slots=2, memory=3, active=active)
                model = TwoTiers(2, 3)
                for adapter_id in (1, 2, 3):
                    model.add(adapter_id, None)
                for adapter_id in active:
                    model.activate(adapter_id)
                for adapter_id in set(pins) & set(active):
                    manager.pin_adapter(adapter_id)
                    model.pin(adapter_id)
                manager.in_use = model.in_use = frozenset(in_use)

                promised = [manager.has_room_for(adapter_id) for adapter_id in (1, 2, 3)]

                assert promised == [can_activate(model, adapter_id) for adapter_id in (1, 2, 3)], (
                    pins,
                    in_use,
                )


def can_activate(model, adapter_id):
    if adapter_id in model.slots or None in model.slots:
        return True
    return any(held not in model.pins | model.in_use for held in model.slots)
