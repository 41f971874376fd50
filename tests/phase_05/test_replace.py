"""Other weights under the same id (lab 5.6)."""

import pytest
from small_model import adapter_of, fail_copies, make_adapter, make_manager, random_weights, slot_holds

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

    assert manager.get_adapter(1) is new
    assert manager.lora_index_to_id == [1, None]
    assert slot_holds(manager, 0, NEW)


def test_an_adapter_in_memory_alone_stays_there_alone():
    manager = manager_with_old()

    manager.replace_adapter(adapter_of(1, NEW))

    assert manager.lora_index_to_id == [None, None]
    manager.activate_adapter(1)
    assert slot_holds(manager, 0, NEW)


def test_replacing_evicts_nobody_though_memory_is_full():
    manager = manager_with_old(slots=2, memory=2)
    manager.add_adapter(make_adapter(2))

    manager.replace_adapter(adapter_of(1, NEW))

    assert set(manager.list_adapters()) == {1, 2}


def test_a_pin_of_the_old_weights_holds_for_the_new():
    manager = manager_with_old(slots=1)
    manager.pin_adapter(1)

    manager.replace_adapter(adapter_of(1, NEW))

    assert manager.pinned_adapters == {1}
    manager.add_adapter(make_adapter(2))
    with pytest.raises(RuntimeError, match="pinned"):
        manager.activate_adapter(2)


def test_new_weights_have_an_identity_of_their_own():
    manager = manager_with_old()
    old_load = manager.get_adapter(1).load_id

    manager.replace_adapter(adapter_of(1, OLD))

    assert manager.get_adapter(1).load_id != old_load


def test_weights_that_do_not_fit_leave_the_old_ones_serving():
    manager = manager_with_old()
    manager.pin_adapter(1)
    wide = adapter_of(1, NEW)
    for lora in wide.loras.values():
        lora.lora_a = lora.lora_a.repeat(1, 2)

    with pytest.raises(ValueError, match="expected"):
        manager.replace_adapter(wide)

    assert manager.pinned_adapters == {1}
    assert slot_holds(manager, 0, OLD)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_that_fails_leaves_the_old_weights_to_be_served(monkeypatch, pinned):
    manager = manager_with_old(slots=1)
    manager.activate_adapter(1)
    if pinned:
        manager.pin_adapter(1)
    old = manager.get_adapter(1)
    fail_first_copy(monkeypatch, manager)

    with pytest.raises(OSError, match="device lost"):
        manager.replace_adapter(adapter_of(1, NEW))

    assert manager.get_adapter(1) is old
    assert manager.pinned_adapters == ({1} if pinned else set())
    assert manager.lora_index_to_id == ([1] if pinned else [None])
    manager.activate_adapter(1)
    assert slot_holds(manager, 0, OLD)


def test_on_a_dead_device_no_slot_names_what_it_does_not_hold(monkeypatch):
    manager = manager_with_old(slots=1)
    manager.pin_adapter(1)
    fail_copies(monkeypatch, manager)

    with pytest.raises(OSError, match="device lost"):
        manager.replace_adapter(adapter_of(1, NEW))

    assert manager.lora_index_to_id == [None]


def test_an_unknown_id_has_nothing_to_replace():
    manager = make_manager(slots=1)

    with pytest.raises(ValueError, match="adapter 3 is not registered"):
        manager.replace_adapter(make_adapter(3))

    assert manager.list_adapters() == {}


def fail_first_copy(monkeypatch, manager):
    layer = manager.modules["mlp.gate_up_proj"]
    set_lora, calls = layer.set_lora, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError("device lost")
        set_lora(*args)

    monkeypatch.setattr(layer, "set_lora", fail_once)
