"""What a captured decode step reads: every fill against rows written by hand."""

import random

import pytest
from gpu import DEVICE

from minivllm.gpu.decode_buffers import DecodeBuffers

BLOCK_SIZE = 4


def make_buffers(max_rows=6, max_blocks=8):
    return DecodeBuffers(max_rows, max_blocks, BLOCK_SIZE, DEVICE)


def table_for(position, rng, spare=0):
    return rng.sample(range(1, 1000), position // BLOCK_SIZE + 1 + spare)


def check(buffers, token_ids, positions, tables, size):
    """Rows are the requests', and the rows up to `size` are padding that reads and writes nothing of theirs."""
    n = len(token_ids)
    padding = [0] * (size - n)
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, p in zip(tables, positions)]

    assert buffers.input_ids[:size].tolist() == token_ids + padding
    assert buffers.positions[:size].tolist() == positions + padding
    assert buffers.slot_mapping[:size].tolist() == slots + padding
    assert buffers.seq_lens[:size].tolist() == [p + 1 for p in positions] + padding
    for i, (table, position) in enumerate(zip(tables, positions)):
        blocks = position // BLOCK_SIZE + 1
        assert buffers.block_tables[i, :blocks].tolist() == table[:blocks]


@pytest.mark.parametrize("max_rows", [1, 5, 6])
@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_batches_is_read_in_full(seed, max_rows):
    """Requests come and go, change places, grow, and come back with other blocks."""
    rng = random.Random(seed)
    buffers = make_buffers(max_rows)
    contexts = []  # (position, table) of whoever runs

    for _ in range(40):
        contexts = [[p + 1, t] for p, t in contexts if rng.random() < 0.9 and p + 1 < 8 * BLOCK_SIZE]
        while len(contexts) < max_rows and (not contexts or rng.random() < 0.4):
            position = rng.randrange(20)
            contexts.insert(rng.randint(0, len(contexts)), [position, table_for(position, rng)])
        for context in contexts:
            position, table = context
            if position // BLOCK_SIZE == len(table):
                table += [rng.randrange(1, 1000)]
            if rng.random() < 0.1:
                context[1] = table_for(position, rng)
        positions, tables = [p for p, _ in contexts], [t for _, t in contexts]
        ids = [rng.randrange(1, 500) for _ in contexts]
        size = rng.randint(len(ids), max_rows)

        buffers.fill(ids, positions, tables, size)

        check(buffers, ids, positions, tables, size)


def test_padding_hides_what_a_larger_batch_left_behind():
    rng = random.Random(1)
    buffers = make_buffers()
    positions = [9, 4, 17, 2, 30, 11]
    tables = [table_for(p, rng) for p in positions]
    buffers.fill([5, 6, 7, 8, 9, 10], positions, tables, 6)

    buffers.fill([3], [1], [[77]], 4)

    check(buffers, [3], [1], [[77]], 4)


def test_a_table_may_be_longer_than_its_context():
    rng = random.Random(2)
    buffers = make_buffers()
    tables = [table_for(3, rng, spare=4), table_for(8, rng, spare=1)]

    buffers.fill([1, 2], [3, 8], tables, 2)

    check(buffers, [1, 2], [3, 8], tables, 2)


def test_addresses_stay():
    buffers = make_buffers()
    before = [t.data_ptr() for t in (buffers.input_ids, buffers.seq_lens, buffers.block_tables)]

    buffers.fill([1, 2], [3, 8], [[1], [2, 3, 4]], 2)

    assert [t.data_ptr() for t in (buffers.input_ids, buffers.seq_lens, buffers.block_tables)] == before
