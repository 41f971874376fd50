"""Other weights under the same id (lab 5.6)."""

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
)

pytestmark = pytest.mark.lab("5.6")

OLD, NEW = random_weights(1), random_weights(2)


def manager_with_old(slots=2, memory=3):
    manager = make_manager(slots, memory)
    manager.add_adapter(adapter_of(1, OLD))
    return manager


def test_an_active_adapter_is_replaced_in_memory_and_slot():
    manager = manager_with_old()
    manager.activate_adapter(1)
    new = adapter_of(1, NEW)

    manager.replace_adapter(new)

    assert manager.get_adapter(1) is new, "the new weights of 1 are not in memory"
    assert_slots(manager, [1, None], "1 was in slot 0 when it was replaced")
    assert manager.pinned_adapters == set(), "1 was not pinned when it was replaced"
    assert_slot_holds(manager, 0, NEW, "the new weights of 1")


def test_an_adapter_in_memory_alone_stays_there_alone():
    manager = manager_with_old()

    manager.replace_adapter(adapter_of(1, NEW))

    assert_slots(manager, [None, None], "1 was in no slot when it was replaced")
    manager.activate_adapter(1)
    assert_slot_holds(manager, 0, NEW, "the new weights of 1")


@pytest.mark.parametrize("in_use", [{}, {1, 2}], ids=["idle", "in use"])
def test_replacing_evicts_nobody_though_memory_and_slots_are_full(in_use):
    manager = manager_with_old(slots=2, memory=2)
    manager.add_adapter(make_adapter(2))
    for adapter_id in (2, 1):
        manager.activate_adapter(adapter_id)
    manager.set_in_use(in_use)

    manager.replace_adapter(adapter_of(1, NEW))

    assert_memory(manager, [1, 2], "1 was replaced, which takes no more room")
    assert_slots(manager, [2, 1], "1 was replaced in its slot")
    assert_slot_holds(manager, 1, NEW, "the new weights of 1")
    assert (manager.stats.evictions, manager.stats.cpu_evictions) == (0, 0), "nobody had to go for it"


def test_a_pin_of_the_old_weights_holds_for_the_new():
    manager = manager_with_old(slots=1)
    manager.pin_adapter(1)

    manager.replace_adapter(adapter_of(1, NEW))

    assert manager.pinned_adapters == {1}, "1 was pinned when it was replaced"
    assert_slots(manager, [1], "1 was pinned when it was replaced")
    assert_slot_holds(manager, 0, NEW, "the new weights of 1")


def test_weights_that_do_not_fit_leave_the_old_ones_serving():
    manager = manager_with_old()
    manager.pin_adapter(1)
    wide = adapter_of(1, NEW)
    for lora in wide.loras.values():
        lora.lora_a = lora.lora_a.repeat(1, 2)
    old = manager.get_adapter(1)

    with pytest.raises(ValueError, match="expected"):
        manager.replace_adapter(wide)

    assert manager.get_adapter(1) is old, "the new weights do not fit, so the old ones stay in memory"
    assert manager.pinned_adapters == {1}, "the new weights do not fit, so the old ones stay pinned"
    assert manager.stats.activations == 1, "the new weights do not fit, so nothing is copied"
    assert_slot_holds(manager, 0, OLD, "the old weights of 1")


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("error", [OSError("device lost"), KeyboardInterrupt("device lost")], ids=repr)
def test_a_copy_that_fails_leaves_the_old_weights_to_be_served(monkeypatch, pinned, error):
    manager = manager_with_old(slots=1)
    manager.activate_adapter(1)
    if pinned:
        manager.pin_adapter(1)
    old = manager.get_adapter(1)
    fail_first_copy(monkeypatch, manager, error)

    with pytest.raises(type(error), match="device lost"):
        manager.replace_adapter(adapter_of(1, NEW))

    assert manager.get_adapter(1) is old, "the copy failed: the old weights should be in memory again"
    assert manager.pinned_adapters == ({1} if pinned else set()), "the copy failed; a pin should hold on"
    assert_slots(
        manager, [1] if pinned else [None], "the copy failed; only a pin brings the old weights back"
    )
    manager.activate_adapter(1)
    assert_slot_holds(manager, 0, OLD, "the old weights of 1")


def test_a_pin_outlives_whatever_breaks_off_the_change(monkeypatch):
    """Ctrl-C may come between any two lines: here it comes when the slot is given up already."""
    manager = manager_with_old()
    manager.pin_adapter(1)
    registered = manager.tiers.memory
    put, interrupts = registered.put, [KeyboardInterrupt()]

    def interrupted_once(*args):
        if interrupts:
            raise interrupts.pop()
        put(*args)

    monkeypatch.setattr(registered, "put", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        manager.replace_adapter(adapter_of(1, NEW))

    assert manager.pinned_adapters == {1}, "1 was pinned, and nobody has unpinned it"
    assert_slot_holds(manager, 0, OLD, "the old weights of 1")


def test_on_a_dead_device_no_slot_names_what_it_does_not_hold(monkeypatch):
    manager = manager_with_old(slots=1)
    manager.pin_adapter(1)
    fail_copies(monkeypatch, manager)

    with pytest.raises(OSError, match="device lost"):
        manager.replace_adapter(adapter_of(1, NEW))

    assert_slots(manager, [None], "no copy succeeds any more")


def test_an_unknown_id_has_nothing_to_replace():
    manager = make_manager(slots=1)

    with pytest.raises(ValueError, match="3"):
        manager.replace_adapter(make_adapter(3))

    assert_memory(manager, [], "3 is not registered, so there is nothing to replace")


def test_new_weights_are_staged_where_a_gpu_copies_from():
    """As those of an adapter that is added are; before anything else changes."""

    class Writer:
        staged = ()

        def stage(self, adapter):
            self.staged = (*self.staged, (adapter, manager.get_adapter(1)))

        def write(self, adapter, slot):
            manager.wrapped.write(adapter, slot)

    manager, new = manager_with_old(), adapter_of(1, NEW)
    old, manager.slot_writer = manager.get_adapter(1), Writer()

    manager.replace_adapter(new)

    assert manager.slot_writer.staged == ((new, old),), "stage(adapter) once, while the old one is in memory"


def fail_first_copy(monkeypatch, manager, error):
    layer = manager.modules["mlp.gate_up_proj"]
    write, calls = layer.write, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise error
        write(*args)

    monkeypatch.setattr(layer, "write", fail_once)
