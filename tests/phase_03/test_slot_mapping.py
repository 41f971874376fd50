"""From adapter ids to slots (lab 3.1), and from slots to runs of rows (lab 3.4)."""

import itertools

import pytest
import torch
from per_token import choose, random_slots

from minivllm.lora.mapping import compute_runs, slots_of


@pytest.mark.lab("3.1")
@pytest.mark.parametrize(
    ("ids", "table", "slots"),
    [
        ((7, 7, 3), [3, 7], [1, 1, 0]),
        ((0, 0), [3, 7], [-1, -1]),
        ((0, 3, 0, 7), [7, None, 3], [-1, 2, -1, 0]),
        ((1, 2, 3), [3, 1, 2], [1, 2, 0]),
        ((), [3], []),
        ((0,), [None, None], [-1]),
    ],
)
def test_every_row_gets_its_adapters_slot_and_base_rows_minus_one(ids, table, slots):
    given = list(table)

    found = slots_of(ids, given)

    assert given == table, f"the table of slots was changed: it was {table}, and is {given}"
    assert list(found) == slots, f"adapters {ids}, slots hold {table}: got {found}, expected {slots}"


@pytest.mark.lab("3.1")
def test_a_row_is_translated_by_where_its_adapter_sits_now():
    """Ids 1 to 4 in random slots, again and again: brute force over the table."""
    generator = torch.Generator().manual_seed(0)

    for _ in range(200):
        table = [choose(generator, [None, 10 * slot + 1, 10 * slot + 2]) for slot in range(4)]
        held = [adapter for adapter in table if adapter is not None]
        ids = tuple(choose(generator, [0, *held]) for _ in range(6))

        slots = slots_of(ids, list(table))

        assert len(slots) == len(ids)
        for row, (adapter, slot) in enumerate(zip(ids, slots)):
            is_right = slot == -1 if adapter == 0 else slot >= 0 and table[slot] == adapter
            assert is_right, f"row {row} of adapter {adapter} got slot {slot}; slots hold {table}"


@pytest.mark.lab("3.1")
@pytest.mark.parametrize(
    ("ids", "missing"), [((1, 9, 0), [9]), ((8, 9, 8), [8, 9]), ((-1,), [-1]), ((2,), [2])]
)
def test_an_adapter_in_no_slot_is_refused_by_name(ids, missing):
    """It would be served by whatever adapter, or none, is there instead."""
    with pytest.raises(ValueError) as refused:
        slots_of(ids, [1, None])

    text = str(refused.value)
    unnamed = [adapter for adapter in missing if str(adapter) not in text]
    assert not unnamed, f"adapters {missing} are in no slot; the error does not name {unnamed}: {text!r}"


@pytest.mark.lab("3.1")
@pytest.mark.parametrize(
    "others", [(1, 2**32 + 1), (2**53, 2**53 + 1), (2**62, 2**62 + 2**32), (7, 2**63 - 1)]
)
def test_ids_may_be_as_large_as_a_request_may_have_them(others):
    """Two of them are one in 32 bits, or as float64."""
    first, second = others

    found = slots_of((second, 0, first, second), [None, first, second])

    assert list(found) == [2, -1, 1, 2], f"slots of the rows of {second}, base, {first}, {second}: {found}"
    with pytest.raises(ValueError, match=str(second)):
        slots_of((second,), [first, None])


@pytest.mark.lab("3.1")
@pytest.mark.parametrize("slot", range(3))
def test_a_free_slot_is_not_the_base(slot):
    table = [5, 6, 7]
    table[slot] = None

    assert slots_of((0,), table) == [-1]


@pytest.mark.lab("3.4")
@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([], []),
        ([-1], []),
        ([0], [(0, slice(0, 1))]),
        ([-1, -1, -1], []),
        ([1, 1, 1], [(1, slice(0, 3))]),
        ([1, 1, 0, 1], [(1, slice(0, 2)), (0, slice(2, 3)), (1, slice(3, 4))]),
        ([-1, 2, 2, -1, 0, -1], [(2, slice(1, 3)), (0, slice(4, 5))]),
        ([2, 2, -1, 2], [(2, slice(0, 2)), (2, slice(3, 4))]),
    ],
)
def test_runs_are_neighbours_with_one_slot(slots, runs):
    given = list(slots)

    found = compute_runs(given)

    assert given == slots, f"the slots of the rows were changed: they were {slots}, and are {given}"
    assert found == runs, f"slots of the rows: {slots}; got {found}, expected {runs}"


@pytest.mark.lab("3.4")
def test_runs_hold_every_adapter_row_once_and_cannot_be_longer():
    generator = torch.Generator().manual_seed(1)

    for _ in range(200):
        slots = random_slots(generator, tokens=choose(generator, range(12)), slots=3)

        runs = compute_runs(list(slots))

        said = f"slots of the rows: {slots}; got {runs}"
        rebuilt = [-1] * len(slots)
        for slot, rows in runs:
            assert rows.stop > rows.start, said
            rebuilt[rows] = [slot] * (rows.stop - rows.start)
        assert rebuilt == slots, said
        assert len(runs) == sum(slot >= 0 for slot, _ in itertools.groupby(slots)), said
        assert [rows.start for _, rows in runs] == sorted(rows.start for _, rows in runs), said
