"""From adapter ids to slots (lab 3.1), and from slots to runs of rows (lab 3.4)."""

import itertools

import pytest
import torch
from per_token import choose, random_slots

from minivllm.lora.mapping import compute_runs, slots_of
from minivllm.vllm.layers import LoRAMapping, LoRAMappingType
from minivllm.vllm.punica_selector import convert_mapping


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


def converted(index_mapping, prompt_mapping, table, extra_vocab_size=0):
    mapping = LoRAMapping(index_mapping, prompt_mapping)
    return convert_mapping(mapping, table, len(table) + 1, 100, extra_vocab_size, "cpu")


def test_tokens_and_sampled_rows_are_mapped_each_by_its_own():
    """Three requests of 3, 1 and 2 tokens, the last of which is not done with its prompt."""
    tokens, sampler, _, _, lengths = converted((8, 8, 8, 0, 5, 5), (8, 0), [5, None, 8])

    assert tokens.tolist() == [2, 2, 2, -1, 0, 0]
    assert sampler.tolist() == [2, -1]
    assert tokens.dtype == sampler.dtype == torch.int64
    assert lengths == [6, 2, 2, 6]


def test_padded_sampler_indices_count_base_rows_as_one_slot_more():
    """As vLLM has it: row + rows * slot, where the base is slot max_loras - 1 of a max_loras that counts it."""
    _, _, padded, _, _ = converted((8, 0, 5), (8, 0, 5), [5, None, 8])

    assert padded.tolist() == [0 + 3 * 2, 1 + 3 * 3, 2 + 3 * 0]


def test_embedding_indices_are_where_each_tokens_rows_start():
    """As vLLM has it: base tokens read where slot 0 does; nobody uses what they read."""
    _, _, _, embeddings, _ = converted((8, 0, 5), (8, 0, 5), [5, None, 8], extra_vocab_size=10)

    assert embeddings.tolist() == [[20, 0, 0], [220, 0, 0]]


@pytest.mark.parametrize(("index", "prompt"), [((1, 4), (1,)), ((1, 1), (4,))])
def test_an_unknown_adapter_is_refused_among_tokens_and_among_sampled_rows(index, prompt):
    with pytest.raises(ValueError, match="4"):
        converted(index, prompt, [1, 2])


def test_a_batch_of_no_rows_has_empty_indices():
    tokens, sampler, padded, embeddings, lengths = converted((), (), [1])

    assert [len(t) for t in (tokens, sampler, padded)] == [0, 0, 0]
    assert embeddings.shape == (2, 0)
    assert lengths == [0, 0, 0, 0]


def test_a_mapping_is_compared_by_its_rows():
    mapping = LoRAMapping([1, 0], [1, 0])

    assert mapping == LoRAMapping((1, 0), (1, 0))
    assert mapping != LoRAMapping((0, 1), (1, 0))
    assert mapping != LoRAMapping((1, 0), (0, 1))
    assert (mapping.index_mapping, mapping.type) == ((1, 0), LoRAMappingType.LANGUAGE)


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
