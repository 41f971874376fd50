"""The slot table and the memo of a batch's mapping (lab 5.3): the same ids may sit in other slots now."""

import pytest

from minivllm.lora.mapping import LoRAMapping
from tests.worlds.managers import assert_slots, make_adapter, make_manager

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
    update = manager.punica_wrapper.begin_step

    def counted(mapping, slot_table):
        calls.append((mapping, list(slot_table)))
        update(mapping, slot_table)

    monkeypatch.setattr(manager.punica_wrapper, "begin_step", counted)
    return calls


def assert_rows_go_to(manager, tokens, sampled=None):
    """Slot of each token's row and, unless None, of each sampled row; -1 = base."""
    __tracebackhide__ = True
    backend = manager.punica_wrapper
    for what, found, expected in (
        ("tokens", backend.token_lora_indices.tolist(), tokens),
        ("sampled rows", backend.sampler_indices.tolist(), sampled),
    ):
        told = f"slots are {manager.list_active_adapters()} (adapter: slot)"
        assert expected in (None, found), f"{told}; {what} should go to {expected}, they go to {found}"


def test_the_table_names_the_adapter_in_each_slot():
    manager = manager_with(3, 1, 2, slots=3)

    assert_slots(manager, [3, 1, 2], "3, 1 and 2 were activated, in this order")


def test_a_use_moves_nobody_to_another_slot():
    manager = manager_with(3, 1, 2, slots=3)

    manager.activate_adapter(3)

    assert_slots(manager, [3, 1, 2], "3 was used again: now last in the order of use, still in slot 0")


def test_a_slot_that_was_left_stays_where_it_is_and_free():
    manager = manager_with(3, 1, 2, slots=3)

    manager.deactivate_adapter(1)

    assert_slots(manager, [3, None, 2], "1 left slot 1")


def test_rows_go_to_the_slots_that_their_adapters_are_in():
    manager = manager_with(3, 1)

    manager.set_adapter_mapping(LoRAMapping((1, 0, 3, 3), (0, 3)))

    assert_rows_go_to(manager, [1, -1, 0, 0], [-1, 0])


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

    assert_slots(manager, [2, 1], "both left, then 2 and 1 were activated")
    assert_rows_go_to(manager, [1, 1, 0], [1, 0])


def test_an_adapter_that_left_its_slot_is_missed_though_the_mapping_is_the_same():
    manager = manager_with(1, 2)
    manager.set_adapter_mapping(LoRAMapping((1,), (1,)))
    manager.deactivate_adapter(1)

    with pytest.raises(
        ValueError, match="in the batch but in no slot"
    ):  # the backend says so, if it is asked
        manager.set_adapter_mapping(LoRAMapping((1,), (1,)))


def test_a_step_like_the_last_translates_nothing(monkeypatch):
    manager = manager_with(1, 2)
    calls = count_updates(monkeypatch, manager)
    manager.set_adapter_mapping(LoRAMapping((1, 2), (1, 2)))

    manager.set_adapter_mapping(LoRAMapping([1, 2], [1, 2]))
    manager.activate_adapter(1)
    manager.set_adapter_mapping(LoRAMapping((1, 2), (1, 2)))

    assert len(calls) == 1, f"three steps alike, and nobody moved: one translation, not {len(calls)}"


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

    assert [call[0] for call in calls] == [LoRAMapping((1, 2), (1, 2)), other], "both have to be translated"


def test_the_backend_is_told_the_mapping_and_the_table(monkeypatch):
    manager = manager_with(3)
    calls = count_updates(monkeypatch, manager)
    mapping = LoRAMapping([], [])

    manager.set_adapter_mapping(mapping)

    assert calls == [(mapping, [3, None])], "mapping, slot table"


def test_a_translation_that_failed_is_not_remembered():
    manager = manager_with(1)
    mapping = LoRAMapping((2,), (2,))
    for _ in range(2):
        with pytest.raises(ValueError, match="in no slot"):
            manager.set_adapter_mapping(mapping)

    manager.activate_adapter(2)
    manager.set_adapter_mapping(mapping)

    assert_rows_go_to(manager, [1], [1])


def test_what_a_translation_that_broke_off_has_overwritten_is_not_remembered_either(monkeypatch):
    manager = manager_with(1, 2)
    mapping = LoRAMapping((1, 1), (1,))
    manager.set_adapter_mapping(mapping)
    update = manager.punica_wrapper.begin_step

    def broken_off(other, *args):
        update(other, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manager.punica_wrapper, "begin_step", broken_off)
        with pytest.raises(KeyboardInterrupt):
            manager.set_adapter_mapping(LoRAMapping((2, 2), (2,)))

    manager.set_adapter_mapping(mapping)
    assert_rows_go_to(manager, [0, 0], [0])
