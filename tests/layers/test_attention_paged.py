"""Attention over scattered blocks equals a softmax written out in float64, and sees only its own context."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.layers.attention import Attention, AttentionMetadata

HEADS, KV_HEADS, SIZE = 6, 2, 8
BLOCK = 4
SCALE = 0.3


class Batch:
    """Random queries, keys and values of several requests, with their history already in the cache."""

    def __init__(self, query_lens, seq_lens, seed=0, garbage=float("nan"), extra_blocks=0):
        rng = np.random.default_rng(seed)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.k = [rng.normal(size=(n, KV_HEADS, SIZE)) for n in seq_lens]
        self.v = [rng.normal(size=(n, KV_HEADS, SIZE)) for n in seq_lens]
        self.q = [rng.normal(size=(n, HEADS, SIZE)) for n in query_lens]
        counts = [-(-n // BLOCK) + extra_blocks for n in seq_lens]
        blocks = iter(rng.permutation(sum(counts) + 3).tolist())
        self.tables = [[next(blocks) for _ in range(count)] for count in counts]
        self.attention = Attention(HEADS, SIZE, SCALE, KV_HEADS)
        shape = self.attention.kv_cache_shape(sum(counts) + 3, BLOCK)
        self.attention.bind_kv_cache(torch.full(shape, garbage, dtype=torch.float64))
        for row, table in enumerate(self.tables):
            for position in range(seq_lens[row] - query_lens[row]):
                place = table[position // BLOCK], position % BLOCK
                self.attention.k_cache[place] = torch.from_numpy(self.k[row][position])
                self.attention.v_cache[place] = torch.from_numpy(self.v[row][position])

    def metadata(self):
        return AttentionMetadata.build(
            self.query_lens, self.seq_lens, self.tables, BLOCK, dtype=torch.float64
        )

    def run(self):
        new_k = [k[-n:] for k, n in zip(self.k, self.query_lens)]
        new_v = [v[-n:] for v, n in zip(self.v, self.query_lens)]
        q, k, v = (torch.from_numpy(np.concatenate(x)) for x in (self.q, new_k, new_v))
        return self.attention.attend(q, k, v, self.metadata()).numpy().reshape(-1, HEADS, SIZE)

    def expected(self):
        """Every head of every token alone, by the definition."""
        rows = []
        for q, k, v in zip(self.q, self.k, self.v):
            for i, token in enumerate(q):
                seen = len(k) - len(q) + i + 1
                for head in range(HEADS):
                    shared = head // (HEADS // KV_HEADS)
                    weights = np.exp(SCALE * k[:seen, shared] @ token[head])
                    rows.append(weights / weights.sum() @ v[:seen, shared])
        return np.array(rows).reshape(-1, HEADS, SIZE)


MIXES = {
    "decodes of one length": ([1, 1, 1], [9, 9, 9]),
    "decodes of many lengths": ([1, 1, 1, 1], [1, 30, 7, 16]),
    "whole prompts": ([5, 12, 2], [5, 12, 2]),
    "chunks with a history": ([5, 3, 8], [17, 4, 40]),
    "decodes among chunks": ([1, 6, 1, 4, 1], [13, 6, 2, 21, 25]),
    "decodes too far apart for one padded product": ([1, 1, 1, 1], [700, 3, 650, 12]),
    "one first token": ([1], [1]),
}


@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_of_rows_equals_the_definition(mix):
    batch = Batch(*MIXES[mix])

    actual = batch.run()

    np.testing.assert_allclose(actual, batch.expected(), rtol=0, atol=1e-12)


def test_new_keys_and_values_are_written_to_the_rows_own_slots():
    batch = Batch([1, 6, 3], [8, 6, 20])

    batch.run()

    for row, table in enumerate(batch.tables):
        for position in range(batch.seq_lens[row]):
            place = table[position // BLOCK], position % BLOCK
            np.testing.assert_array_equal(batch.attention.k_cache[place], batch.k[row][position])
            np.testing.assert_array_equal(batch.attention.v_cache[place], batch.v[row][position])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e300])
def test_memory_a_request_did_not_write_cannot_reach_it(garbage):
    batch = Batch([1, 1, 5, 1], [5, 18, 11, 2], garbage=garbage, extra_blocks=2)

    actual = batch.run()

    np.testing.assert_allclose(actual, batch.expected(), rtol=0, atol=1e-12)


def test_a_request_whose_values_are_nan_spoils_nobody_else():
    batch = Batch([1, 1, 1], [9, 21, 14])
    batch.k[0][:], batch.v[0][:], batch.q[0][:] = np.nan, np.nan, np.nan

    actual = batch.run()

    assert np.isnan(actual[0]).all()
    np.testing.assert_allclose(actual[1:], batch.expected()[1:], rtol=0, atol=1e-12)


def test_a_long_context_does_not_pad_the_short_ones_to_its_length():
    seq_lens = [4000] + [20] * 30

    attn = AttentionMetadata.build([1] * 31, seq_lens, [[0] * 1000] + [[1] * 5] * 30, BLOCK)

    assert sum(len(group.slots) for group in attn.decodes) == sum(seq_lens)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_padded_reads_stay_within_the_requests_own_context(data):
    seq_lens = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=8))
    query_lens = [data.draw(st.sampled_from([1, 1, min(2, n), n])) for n in seq_lens]
    batch = Batch(query_lens, seq_lens, extra_blocks=1)
    own = [
        {table[p // BLOCK] * BLOCK + p % BLOCK for p in range(n)} for table, n in zip(batch.tables, seq_lens)
    ]

    attn = batch.metadata()

    starts = dict(zip(attn.query_start_loc, range(len(seq_lens))))
    decodes = [row for row, n in enumerate(query_lens) if n == 1]
    seen = []
    for group in attn.decodes:
        tokens = attn.query_start_loc[:-1] if group.rows is None else group.rows.tolist()
        rows = [starts[token] for token in tokens]
        for row, slots in zip(rows, group.slots.view(len(rows), -1).tolist()):
            assert set(slots) == own[row]
        seen += rows
    assert sorted(seen) == decodes
    assert {starts[chunk.start] for chunk in attn.prefills} == set(range(len(seq_lens))) - set(decodes)
    assert [len(chunk.slots) for chunk in attn.prefills if chunk.slots is not None] == [
        n for q, n in zip(query_lens, seq_lens) if 1 < q < n
    ]
