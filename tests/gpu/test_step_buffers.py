"""What a captured step reads: every fill against rows written by hand."""

import random

import numpy as np
import pytest

from minivllm.gpu.step_buffers import StepBuffers, StepShape
from tests.tools.device import DEVICE

BLOCK_SIZE = 4


def make_buffers(max_rows=6, max_blocks=8, tile_tokens=1):
    """Buffers for steps of up to four times as many tokens as rows."""
    largest = StepShape(4 * max_rows, max_rows, tile_tokens)
    buffers = StepBuffers([largest], max_blocks, BLOCK_SIZE, DEVICE)
    buffers.block_tables.fill_(10**9)
    return buffers


def table_for(context, rng, spare=0):
    return rng.sample(range(1, 1000), -(-context // BLOCK_SIZE) + spare)


def fill(buffers, shape, token_ids, query_lens, starts, tables, last_rows):
    buffers.fill(token_ids, np.array(query_lens), np.array(starts), tables, last_rows, shape)


def check(buffers, shape, token_ids, query_lens, starts, tables, last_rows):
    """Rows are the requests', and those up to the shape's are padding, which reads and writes nothing of theirs."""
    n = len(token_ids)
    zeros = [0] * (shape.tokens - n)
    positions = [start + i for start, count in zip(starts, query_lens) for i in range(count)]
    owners = [request for request, count in enumerate(query_lens) for _ in range(count)]
    slots = [
        tables[request][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for request, p in zip(owners, positions)
    ]
    fields, attn = buffers.fields(shape), buffers.attention(shape, 64)

    assert fields.input_ids.tolist() == token_ids + zeros
    assert fields.positions.tolist() == positions + zeros
    assert fields.slot_mapping.tolist() == attn.slot_mapping.tolist() == slots + zeros
    assert fields.last_rows.tolist() == last_rows + [0] * (shape.rows - len(last_rows))
    ((tiles, most_tokens),) = attn.tiles
    assert most_tokens == shape.tile_tokens
    seen = []  # (row, request, position), and for padding (row, None, a position before 0)
    for request, row, length, position in tiles.T.tolist():
        assert length <= most_tokens
        seen += [(row + i, request if position >= 0 else None, position + i) for i in range(length)]
    padding = [(row, None, row - shape.tokens) for row in range(n, shape.tokens)]
    assert seen == [*zip(range(n), owners, positions), *padding]
    for request, (start, count) in enumerate(zip(starts, query_lens)):
        blocks = -(-(start + count) // BLOCK_SIZE)
        assert attn.block_tables[request, :blocks].tolist() == tables[request][:blocks]


@pytest.mark.parametrize("tile_tokens", [1, 5])
@pytest.mark.parametrize("max_rows", [1, 5, 6])
@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_batches_is_read_in_full(seed, max_rows, tile_tokens):
    """Requests come and go, change places, grow, and come back with other blocks, or more than they fill. Shapes take
    turns, and of a larger batch nothing is left in the padding of a smaller one."""
    rng = random.Random(seed)
    buffers = make_buffers(max_rows, tile_tokens=tile_tokens)
    contexts = []  # [tokens computed, table] of each request that runs

    for _ in range(40):
        contexts = [c for c in contexts if rng.random() < 0.9 and c[0] + 4 <= 8 * BLOCK_SIZE]
        while len(contexts) < max_rows and (not contexts or rng.random() < 0.4):
            computed = rng.randrange(20)
            spare = rng.randint(0, 2)
            contexts.insert(rng.randint(0, len(contexts)), [computed, table_for(computed, rng, spare)])
        query_lens = [1 if tile_tokens == 1 else rng.randint(1, 4) for _ in contexts]
        for context, count in zip(contexts, query_lens):
            if rng.random() < 0.1:
                context[1] = table_for(context[0], rng)
            while len(context[1]) * BLOCK_SIZE < context[0] + count:
                context[1].append(rng.randrange(1, 1000))
        starts, tables = [c for c, _ in contexts], [t for _, t in contexts]
        ids = [rng.randrange(1, 500) for _ in range(sum(query_lens))]
        tokens = rng.randint(len(ids), 4 * max_rows)
        shape = StepShape(tokens, min(tokens, max_rows), tile_tokens)
        last_rows = sorted(rng.sample(range(len(ids)), rng.randint(0, min(len(ids), shape.rows))))

        fill(buffers, shape, ids, query_lens, starts, tables, last_rows)

        check(buffers, shape, ids, query_lens, starts, tables, last_rows)
        for context, count in zip(contexts, query_lens):
            context[0] += count


def test_addresses_stay():
    buffers, shape = make_buffers(), StepShape(4, 4, 1)

    def addresses():
        return [field.data_ptr() for field in (*buffers.fields(shape), buffers.block_tables)]

    before = addresses()
    fill(buffers, shape, [1, 2], [1, 1], [3, 8], [[1], [2, 3, 4]], [0, 1])

    assert addresses() == before
