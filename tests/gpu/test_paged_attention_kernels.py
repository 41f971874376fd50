"""The GPU's attention over a paged cache against a softmax in float64; foreign and unwritten memory is NaN."""

import functools

import numpy as np
import pytest
import torch

from minivllm.gpu.fused.blocks import attend
from minivllm.gpu.kernels import attention as kernels
from minivllm.gpu.kernels.attention import num_splits, paged_attention
from minivllm.gpu.paged_attention import PagedAttentionMetadata
from minivllm.layers.attention import Attention
from tests.tools.device import DEVICE, needs_cuda
from tests.tools.memory import Guarded
from tests.tools.nights import by_day

SCALE = 0.2
ERRORS = {torch.float32: 3e-6, torch.float16: 3e-3}
if DEVICE == "cuda":  # the interpreter computes bfloat16 wrongly
    ERRORS[torch.bfloat16] = 2e-2


@pytest.fixture(params=ERRORS, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def new_memory_is_nan():
    """Outputs and partial results that nobody wrote show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Batch:
    """Random requests with their history in a scattered cache; everything else in it is NaN.

    heads: (query heads, kv heads, head size)
    """

    def __init__(self, query_lens, seq_lens, dtype=torch.float32, heads=(6, 2, 16), block_size=4, seed=0):
        self.num_heads, self.num_kv_heads, self.size = heads
        self.query_lens, self.seq_lens, self.block_size = query_lens, seq_lens, block_size
        self.dtype, self.rng = dtype, np.random.default_rng(seed)
        self.q = [self.random(n, self.num_heads) for n in query_lens]
        self.k = [self.random(n, self.num_kv_heads) for n in seq_lens]
        self.v = [self.random(n, self.num_kv_heads) for n in seq_lens]
        counts = [-(-n // block_size) + 1 for n in seq_lens]
        blocks = iter(self.rng.permutation(sum(counts)) + 1)  # block 0 is the null block
        self.tables = [[int(next(blocks)) for _ in range(count)] for count in counts]
        shape = (sum(counts) + 1, block_size, 2 * self.num_kv_heads, self.size)
        self.kv_cache = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)

    def random(self, tokens, heads):
        return torch.from_numpy(self.rng.normal(size=(tokens, heads, self.size))).to(self.dtype)

    def write(self, row, start, end):
        """Put the keys and values of a request's positions start..end in its blocks."""
        for position in range(start, end):
            place = self.tables[row][position // self.block_size], position % self.block_size
            self.kv_cache[place] = torch.cat((self.k[row][position], self.v[row][position])).to(DEVICE)

    def metadata(self):
        rest = self.tables, self.block_size, 128 // (self.num_heads // self.num_kv_heads), DEVICE
        return PagedAttentionMetadata.build(self.query_lens, self.seq_lens, *rest)

    def heads(self):
        """(T, Hq + 2 Hkv, D) as the qkv linear gives them"""
        rows = zip(self.q, self.k, self.v)
        return torch.cat([torch.cat((q, k[-len(q) :], v[-len(q) :]), dim=1) for q, k, v in rows if len(q)])

    def expected(self):
        """(T, Hq * D) by the definition"""
        outputs = []
        for q, k, v in zip(self.q, self.k, self.v):
            group = self.num_heads // self.num_kv_heads
            k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))  # (L, Hq, D)
            scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * SCALE
            later = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]  # (n, L)
            weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
            outputs.append(torch.einsum("hnl,lhd->nhd", weights, v).flatten(1))
        return torch.cat(outputs)


def assert_close(actual, expected):
    assert actual.isfinite().all()
    error = ERRORS[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=error, atol=error)


def decode(batch, max_seq_len, rows=None):
    """Run the kernel on single tokens whose keys and values are in the cache already."""
    for row, length in enumerate(batch.seq_lens):
        batch.write(row, 0, length)
    rows = list(range(len(batch.seq_lens))) if rows is None else rows
    q = torch.full((max(rows) + 1, *batch.q[0].shape[1:]), torch.nan, dtype=batch.dtype)
    q[rows] = torch.cat(batch.q)
    widest = max(map(len, batch.tables))
    # Behind its context a table may hold anything.
    tables = [table + [10**9] * (widest - len(table)) for table in batch.tables]
    out = torch.full((len(q), batch.num_heads * batch.size), torch.nan, dtype=batch.dtype, device=DEVICE)
    paged_attention(
        Guarded(q, device=DEVICE).view,
        batch.kv_cache,
        single_tokens(rows, batch.seq_lens),
        1,
        torch.tensor(tables, dtype=torch.int32, device=DEVICE),
        max_seq_len,
        SCALE,
        out,
    )
    return out


def single_tokens(rows, seq_lens):
    """Tiles of decodes; of no context, padding"""
    tiles = [(request, row, 1, length - 1) for request, (row, length) in enumerate(zip(rows, seq_lens))]
    return torch.tensor(tiles, dtype=torch.int32, device=DEVICE).T.contiguous()


@pytest.mark.parametrize("max_seq_len", [300, 4096], ids=["few splits", "many splits"])
@pytest.mark.parametrize(
    "heads_and_block_size",
    by_day([((6, 2, 64), 16), ((3, 1, 80), 4), ((20, 1, 128), 16)], 3, pytest.mark.nightly_without_gpu),
)
def test_decodes_of_any_length_equal_the_definition(dtype, heads_and_block_size, max_seq_len):
    batch = Batch([1] * 4, [1, 300, 64, 129], dtype, *heads_and_block_size)

    actual = decode(batch, max_seq_len)

    assert_close(actual, batch.expected())


def test_a_full_gpu_does_not_split_contexts(monkeypatch):
    monkeypatch.setattr(kernels, "TARGET_PROGRAMS", 4)  # two kv heads of three requests are more
    batch = Batch([1] * 3, [5, 150, 33])

    actual = decode(batch, 4096)

    assert_close(actual, batch.expected())


@pytest.mark.parametrize("max_seq_len", [16, 4096], ids=["one split", "many splits"])
def test_padding_gives_zeros_and_rows_that_are_nobodys_are_not_written(max_seq_len):
    batch = Batch([1, 1], [9, 13])
    expected = torch.cat((batch.expected(), torch.zeros(2, 96, dtype=torch.float64)))
    for _ in range(2):
        batch.q.append(batch.random(1, 6))
        batch.tables.append([10**9])
        batch.seq_lens = [*batch.seq_lens, 0]

    actual = decode(batch, max_seq_len, rows=[4, 1, 5, 2])

    assert_close(actual[[4, 1, 5, 2]], expected)
    assert actual[[0, 3]].isnan().all()


def test_splits_of_unlike_contexts_meet_again_and_again():
    """Some have one split that is not empty, some many, and padding is among them. No count is left of a step."""
    batch = Batch([1] * 6, [1, 400, 0, 256, 0, 131], heads=(6, 2, 64), block_size=16)
    expected = batch.expected()

    answers = [decode(batch, 4096) for _ in range(2)]

    for actual in answers:
        assert_close(actual, expected)
        assert torch.equal(actual, answers[0])
    assert not kernels._counts(16, answers[0].device).any()


@pytest.mark.parametrize("max_seq_len", [128, 4096], ids=["one split", "many splits"])
def test_a_request_whose_values_are_nan_spoils_nobody_else(max_seq_len):
    batch = Batch([1, 1, 1], [9, 128, 14])
    expected = batch.expected()
    batch.k[1][3], batch.v[1][3] = torch.nan, torch.nan

    actual = decode(batch, max_seq_len)

    assert actual[1].isnan().all()
    assert_close(actual[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(
    ("requests", "max_seq_len", "expected"), [(1, 8192, 32), (1, 63, 1), (16, 8192, 2), (32, 8192, 1)]
)
def test_contexts_are_split_to_fill_a_gpu_and_no_further(requests, max_seq_len, expected):
    assert num_splits(8 * requests, -(-max_seq_len // 64)) == expected


MIXES = {
    "decodes": ([1, 1, 1], [9, 30, 1]),
    "chunks with a history": ([5, 3, 8], [17, 4, 40]),
    "decodes among whole prompts": ([1, 6, 1, 4, 1], [13, 6, 2, 4, 75]),
    "decodes among chunks": ([4, 1, 6, 1, 3], [21, 13, 6, 2, 25]),
}


@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_of_rows_equals_the_definition(mix):
    batch = Batch(*MIXES[mix])
    for row, (new, length) in enumerate(zip(batch.query_lens, batch.seq_lens)):
        batch.write(row, 0, length - new)
    expected_cache = Batch(*MIXES[mix])
    for row, length in enumerate(batch.seq_lens):
        expected_cache.write(row, 0, length)
    attention = Attention(batch.num_heads, batch.size, SCALE, batch.num_kv_heads)
    attention.bind_kv_cache(batch.kv_cache)
    heads = Guarded(batch.heads(), device=DEVICE)
    cos, sin = torch.ones(2, sum(batch.query_lens), 1, batch.size, device=DEVICE) * torch.tensor(
        [1.0, 0.0], device=DEVICE
    ).view(2, 1, 1, 1)

    actual = attend(attention, heads.view, (cos, sin), batch.metadata())

    assert_close(actual, batch.expected())
    heads.assert_intact()
    torch.testing.assert_close(batch.kv_cache, expected_cache.kv_cache, rtol=0, atol=0, equal_nan=True)


def test_metadata_of_decodes_among_chunks():
    attn = PagedAttentionMetadata.build(
        [2, 1, 3, 1], [2, 6, 5, 3], [[7], [3, 9, 4], [2, 8], [5]], block_size=4, tile_tokens=2
    )

    assert attn.slot_mapping.tolist() == [28, 29, 37, 10, 11, 32, 22]
    assert [row[:n] for row, n in zip(attn.block_tables.tolist(), [1, 2, 2, 1])] == [[7], [3, 9], [2, 8], [5]]
    assert attn.max_seq_len == 6
    decodes, prompts = attn.tiles
    assert (decodes.most_tokens, prompts.most_tokens) == (1, 2)
    assert decodes.places.T.tolist() == [[1, 2, 1, 5], [3, 6, 1, 2]]
    assert prompts.places.T.tolist() == [[0, 0, 2, 0], [2, 3, 2, 2], [2, 5, 1, 4]]


def test_metadata_of_one_kind_has_one_launch():
    """And where no contexts may be split, decodes are among the prompts."""
    build = functools.partial(PagedAttentionMetadata.build, block_size=4, tile_tokens=2)

    prompts = build([2, 3], [2, 3], [[7], [2]])
    decodes = build([1, 1], [2, 3], [[7], [2]])
    together = build([2, 1], [2, 3], [[7], [2]], splits_decodes=False)

    assert [tiles.most_tokens for tiles in prompts.tiles] == [2]
    assert [tiles.most_tokens for tiles in decodes.tiles] == [1]
    assert [(tiles.most_tokens, tiles.places.shape[1]) for tiles in together.tiles] == [(2, 2)]


@needs_cuda
@pytest.mark.parametrize("max_seq_len", [16, 4096], ids=["one split", "many splits"])
def test_a_captured_graph_follows_its_refilled_buffers(dtype, max_seq_len):
    batch = Batch([1] * 3, [3, 300, 129], dtype, (6, 2, 64), 16)
    decode(batch, max_seq_len)  # compiles, and fills the cache
    q = torch.zeros(4, 6, 64, dtype=dtype, device=DEVICE)
    tables = torch.zeros(4, max(map(len, batch.tables)), dtype=torch.int32, device=DEVICE)
    tiles = single_tokens(range(4), [0] * 4)
    output = torch.full((4, 6 * 64), torch.nan, dtype=dtype, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(q, batch.kv_cache, tiles, 1, tables, max_seq_len, SCALE, output)

    for row, (query, table, length) in zip((0, 1, 3), zip(batch.q, batch.tables, batch.seq_lens)):
        q[row] = query[0].to(DEVICE)
        tables[row, : len(table)] = torch.tensor(table)
        tiles[3, row] = length - 1
    graph.replay()

    assert_close(output[[0, 1, 3]], batch.expected())
    assert (output[2] == 0).all()
