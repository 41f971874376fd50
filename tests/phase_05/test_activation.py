"""Into a slot (lab 5.2), against the adapter's own A and B. Empty and failed slots name nobody."""

import itertools
import time

import pytest
import torch

from tests.worlds.managers import (
    adapter_of,
    assert_memory,
    assert_slot_holds,
    assert_slots,
    count_copies,
    fail_copies,
    make_adapter,
    make_manager,
    make_plain_manager,
    random_weights,
)

pytestmark = pytest.mark.lab("5.2")


def test_every_slot_holds_the_weights_of_its_own_adapter():
    weights = {adapter_id: random_weights(adapter_id) for adapter_id in (4, 9, 2)}
    manager = make_plain_manager(slots=3)

    for adapter_id in weights:
        manager.add_adapter(adapter_of(adapter_id, weights[adapter_id]))
        assert manager.activate_adapter(adapter_id) is True, f"adapter {adapter_id} was copied: True"

    assert_slots(manager, [4, 9, 2], "4, 9 and 2 were activated, in this order")
    for slot, adapter_id in enumerate([4, 9, 2]):
        assert_slot_holds(manager, slot, weights[adapter_id], f"adapter {adapter_id}")


@pytest.mark.parametrize("backend", ["loops", "grouped"])
def test_the_next_adapter_in_a_slot_keeps_nothing_of_the_last(backend):
    weights = {adapter_id: random_weights(adapter_id) for adapter_id in range(1, 9)}
    manager = make_manager(slots=1, memory=8, punica_backend=backend)
    for adapter_id in weights:
        manager.add_adapter(adapter_of(adapter_id, weights[adapter_id]))

    for adapter_id in (1, 2, 3, 4, 5, 6, 7, 8, 1, 5):
        manager.activate_adapter(adapter_id)

        assert_slot_holds(manager, 0, weights[adapter_id], f"adapter {adapter_id} and nothing else")


def test_the_first_free_slot_is_taken():
    weights = random_weights(4)
    manager = make_plain_manager(slots=3, memory=4)
    for adapter_id in (1, 2, 3):
        manager.add_adapter(make_adapter(adapter_id))
        manager.activate_adapter(adapter_id)
    manager.add_adapter(adapter_of(4, weights))
    manager.deactivate_adapter(2)
    manager.deactivate_adapter(1)

    manager.activate_adapter(4)

    assert_slots(manager, [4, None, 3], "slots 0 and 1 were free when 4 was activated")
    assert_slot_holds(manager, 0, weights, "adapter 4")


def test_an_adapter_that_is_in_a_slot_is_not_copied_again(monkeypatch):
    manager = make_manager(slots=2)
    manager.add_adapter(make_adapter(1))
    manager.activate_adapter(1)
    copies = count_copies(monkeypatch, manager)

    assert manager.activate_adapter(1) is False, "adapter 1 was in a slot: nothing was copied, so False"

    assert copies == [], f"adapter 1 was in slot 0 already, but was copied into {copies}"
    assert_slots(manager, [1, None], "adapter 1 was activated twice")


def test_being_activated_and_being_found_in_a_slot_count_as_use():
    manager = make_manager(slots=2, memory=3)
    for adapter_id in (1, 2, 3):
        manager.add_adapter(make_adapter(adapter_id))
    for adapter_id in (1, 2, 1):
        manager.activate_adapter(adapter_id)

    manager.activate_adapter(3)

    assert_slots(manager, [1, 3], "1, 2, 1 were activated: 2 was used longest ago and makes room for 3")
    manager.add_adapter(make_adapter(4))
    assert_memory(manager, [1, 3, 4], "1, 2, 1, 3 were activated: 2 makes room in memory for 4")


def test_copies_and_their_slots_are_counted(monkeypatch):
    """By a clock that is five seconds later at each look."""
    now = itertools.count(10**6, 5)
    for clock in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: float(next(now)))
    manager = make_manager(slots=2)
    for adapter_id in (5, 6):
        manager.add_adapter(make_adapter(adapter_id))

    for adapter_id in (5, 6, 5):
        manager.activate_adapter(adapter_id)

    counted = [(event.kind, event.adapter_id, event.slot) for event in manager.stats.drain_events()]
    assert counted == [("activate", 5, 0), ("activate", 6, 1)], (
        f"two copies, 5 to 0 and 6 to 1, not {counted}"
    )
    assert 0 < manager.stats.activate_seconds < 1000


def test_an_adapter_is_not_in_the_table_while_it_is_copied(monkeypatch):
    """Promised: whoever sees an adapter in the table may send rows to its slot. The copy itself looks here."""
    manager = make_manager(slots=1, memory=2)
    for adapter_id in (1, 2):
        manager.add_adapter(make_adapter(adapter_id))
    manager.activate_adapter(1)
    write, seen = manager.wrapped.write, []

    def copy(lora, slot):
        seen.append((manager.lora_index_to_id, manager.list_active_adapters()))
        write(lora, slot)
        seen.append((manager.lora_index_to_id, manager.list_active_adapters()))

    monkeypatch.setattr(manager.wrapped, "write", copy)
    manager.activate_adapter(2)

    assert seen == [([None], {})] * 2, (
        "the table before and after the copy of 2 into slot 0, from which 1 was evicted"
    )
    assert_slots(manager, [2], "2 was activated")


def test_an_activation_is_told_when_the_table_names_the_adapter():
    manager = make_manager(slots=2)
    weights, told = random_weights(5), []
    manager.add_adapter(adapter_of(5, weights))

    def listener(event):
        told.append((event.kind, manager.lora_index_to_id))
        assert_slot_holds(manager, 0, weights, "adapter 5 when its activation is told")

    manager.listeners.append(listener)
    manager.activate_adapter(5)

    assert told == [("activate", [5, None])], "what was told, and the table at that moment"


def test_the_seconds_that_are_told_have_the_copy_in_them(monkeypatch):
    now = [10.0]
    for clock in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    manager, told = make_manager(slots=1), []
    manager.add_adapter(make_adapter(1))
    manager.listeners.append(told.append)
    write = manager.wrapped.write

    def takes_seven_seconds(lora, slot):
        now[0] += 7
        write(lora, slot)

    monkeypatch.setattr(manager.wrapped, "write", takes_seven_seconds)

    manager.activate_adapter(1)

    assert [event.seconds for event in told] == [7], (
        f"seconds told: {[event.seconds for event in told]}; copying took 7"
    )


def test_a_failed_copy_leaves_the_slot_free_and_the_adapter_inactive(monkeypatch):
    """Incident 4: the table must not name an adapter whose weights are not, or only partly, there."""
    manager = make_manager(slots=2)
    manager.add_adapter(make_adapter(1, seed=1))
    fail_copies(monkeypatch, manager)

    with pytest.raises(OSError, match="device lost"):
        manager.activate_adapter(1)

    assert_slots(manager, [None, None], "copying adapter 1 failed, so it is in no slot")
    assert manager.stats.activations == 0, "a copy that failed is not counted"
    assert_slot_holds(manager, 0, None, "nothing")


class _Gone(BaseException):
    """What is no Exception, as Ctrl-C is none."""


def three_in_memory_two_in_slots():
    """1 in slot 0, 2 in slot 1, and 1 was used longest ago; the weights of all, and what listeners hear."""
    weights = {adapter_id: random_weights(adapter_id) for adapter_id in (1, 2, 3)}
    manager, told = make_manager(slots=2, memory=3), []
    for adapter_id in (3, 1, 2):
        manager.add_adapter(adapter_of(adapter_id, weights[adapter_id]))
    for adapter_id in (1, 2):
        manager.activate_adapter(adapter_id)
    manager.listeners.append(lambda event: told.append((event.kind, event.adapter_id, event.slot)))
    return manager, weights, told


def fail_once(monkeypatch, manager, error):
    """The next copy raises when the layers were written in part; those after it succeed."""
    layer, errors = manager.modules["mlp.gate_up_proj"], [error]
    write = layer.write

    def failing(*args, **kwargs):
        if errors:
            raise errors.pop()
        return write(*args, **kwargs)

    monkeypatch.setattr(layer, "write", failing)


@pytest.mark.parametrize("error", [OSError("device lost"), KeyError(3), _Gone()], ids=repr)
def test_a_copy_that_fails_in_the_slot_of_another_changes_nothing_else(monkeypatch, error):
    manager, weights, told = three_in_memory_two_in_slots()
    fail_once(monkeypatch, manager, error)

    with pytest.raises(type(error)) as raised:
        manager.activate_adapter(3)

    assert raised.value is error, "it comes out as it was raised"
    assert_slots(manager, [None, 2], "3 was to replace 1 in slot 0, and its copy failed")
    assert_slot_holds(manager, 0, None, "nothing")
    assert_slot_holds(manager, 1, weights[2], "adapter 2, which had no part in it")
    assert list(manager.list_adapters()) == [3, 1, 2], (
        "who is in memory, and in which order they were used, is as before"
    )
    assert told == [("evict", 1, 0)], "1 has left its slot; 3 has come into none"


def test_after_a_copy_that_failed_the_free_slot_is_taken_and_nobody_evicted(monkeypatch):
    manager, weights, told = three_in_memory_two_in_slots()
    fail_once(monkeypatch, manager, OSError("device lost"))
    with pytest.raises(OSError):
        manager.activate_adapter(3)
    told.clear()

    assert manager.activate_adapter(3) is True

    assert_slots(manager, [3, 2], "slot 0 was free")
    assert_slot_holds(manager, 0, weights[3], "adapter 3")
    assert told == [("activate", 3, 0)]


def test_where_nobody_may_leave_a_slot_nothing_changes():
    manager, weights, told = three_in_memory_two_in_slots()
    manager.set_in_use({1, 2})

    with pytest.raises(RuntimeError):
        manager.activate_adapter(3)

    assert_slots(manager, [1, 2], "1 and 2 are in use")
    for slot, adapter_id in enumerate((1, 2)):
        assert_slot_holds(manager, slot, weights[adapter_id], f"adapter {adapter_id}")
    assert list(manager.list_adapters()) == [3, 1, 2], "3 was not activated, which is no use"
    assert told == []


@pytest.mark.parametrize("make", [make_plain_manager, make_manager])
def test_an_unknown_id_is_refused_before_anybody_is_evicted_for_it(make):
    """Incident 21."""
    weights = random_weights(1)
    manager = make(slots=1)
    manager.add_adapter(adapter_of(1, weights))
    manager.activate_adapter(1)

    with pytest.raises(ValueError, match="7"):
        manager.activate_adapter(7)

    assert_slots(manager, [1], "7 is not registered: nobody makes room for it")
    assert_slot_holds(manager, 0, weights, "adapter 1")
    assert manager.stats.evictions == 0, "7 is not registered: nobody is evicted for it"


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
            assert torch.equal(full.to(torch.bfloat16), rounded), f"lora_B of {name}"
