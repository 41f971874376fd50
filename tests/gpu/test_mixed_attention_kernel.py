"""One kernel for prompts and decodes against a softmax in float64; foreign and unwritten memory is NaN."""

import numpy as np
import pytest
import torch
from test_paged_attention_kernels import ERRORS, SCALE, Batch, assert_close, new_memory_is_nan

from minivllm.gpu.kernels.attention import paged_attention
from minivllm.gpu.step_buffers import StepBuffers, StepShape
from tests.tools.device import DEVICE
from tests.tools.memory import Guarded

__all__ = ["new_memory_is_nan"]


@pytest.fixture(params=ERRORS, ids=str)
def dtype(request):
    return request.param


def filled_buffers(batch, padding):
    """Attention's part of the buffers of a step, `padding` tokens more than it has; behind their contexts tables hold
    anything."""
    tokens = sum(batch.query_lens)
    tile_tokens = max(2, 64 // (batch.num_heads // batch.num_kv_heads))
    shape = StepShape(tokens + padding, len(batch.query_lens) + 2, tile_tokens)
    buffers = StepBuffers([shape], max(map(len, batch.tables)), batch.block_size, DEVICE)
    buffers.block_tables.fill_(10**9)
    queries, contexts = np.array(batch.query_lens), np.array(batch.seq_lens)
    used = -(-contexts // batch.block_size)
    tables = [table[:blocks] for table, blocks in zip(batch.tables, used)]
    ids = list(range(100, 100 + tokens))
    buffers.fill(ids, queries, contexts - queries, tables, [], shape)
    return buffers.attention(shape, max_seq_len=4096)


def attend(batch, padding):
    for row, length in enumerate(batch.seq_lens):
        batch.write(row, 0, length)
    tokens = sum(batch.query_lens) + padding
    attn = filled_buffers(batch, padding)
    q = torch.full((tokens, batch.num_heads, batch.size), torch.nan, dtype=batch.dtype)
    q[: tokens - padding] = torch.cat(batch.q)
    q[tokens - padding :] = 1
    view = Guarded(q, device=DEVICE).view
    out = torch.full((tokens, batch.num_heads * batch.size), torch.nan, dtype=batch.dtype, device=DEVICE)
    (tiles,) = attn.tiles
    paged_attention(view, batch.kv_cache, *tiles, attn.block_tables, attn.max_seq_len, SCALE, out)
    return out


# query and sequence lengths, heads, block size
STEPS = {
    "prompts": ([5, 70, 1, 33], [5, 70, 1, 33], (6, 2, 64), 16),
    "chunks and decodes": ([1, 40, 1, 7, 1], [130, 100, 1, 71, 64], (3, 1, 80), 4),
    "a prefix that was found": ([3, 25], [67, 41], (20, 1, 32), 16),
    "more query heads than a tile has rows": ([1, 3], [20, 5], (71, 1, 16), 4),
}


@pytest.mark.parametrize("step", STEPS)
def test_every_mixture_equals_the_definition_and_padding_gives_zeros(dtype, step):
    queries, contexts, *of_cache = STEPS[step]
    batch = Batch(queries, contexts, dtype, *of_cache)

    actual = attend(batch, padding=50)

    zeros = torch.zeros(50, actual.shape[1], dtype=torch.float64)
    assert_close(actual, torch.cat((batch.expected(), zeros)))
