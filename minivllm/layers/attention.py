"""Attention over a paged KV cache. Stands for vllm/model_executor/layers/attention (v0.22.1)."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# Decodes share one padded product; one much longer than the shortest starts a product of its own, so that a
# long context does not make every short one pay for it.
PADDING_FACTOR = 2
PADDING_FREE = 128


@dataclass(frozen=True)
class DecodeGroup:
    """n requests with one new token each, padded to the longest context L.

    rows: (n,) int64 token indices in the batch, or None when the group is the whole batch in order.
    slots: (n * L,) int64 cache slots to gather. Padding repeats the request's own first slot, and is masked:
        its weight is zero, but zero times the NaN that foreign memory might hold would be NaN.
    mask: (n, 1, 1, L) added to the scores, or None without padding.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens start..end of the batch, a run of one request's prompt.

    slots: (L,) int64 cache slots of its whole context so far, or None when the chunk is the whole context.
    mask: (n, L) added to the scores, or None when plain causal attention does.
    """

    start: int
    end: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class AttentionMetadata:
    """Who attends to what in one step, computed once for all layers (vLLM: CommonAttentionMetadata).

    slot_mapping: (T,) int64 cache slot (block * block_size + offset) each new token is written to.
    query_start_loc: P + 1 offsets of the requests' tokens in the batch.
    seq_lens: P context lengths, new tokens included.
    """

    slot_mapping: torch.Tensor
    query_start_loc: list[int]
    seq_lens: list[int]
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]

    @classmethod
    def build(
        cls,
        query_lens: list[int],
        seq_lens: list[int],
        block_tables: list[list[int]],
        block_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "AttentionMetadata":
        """Rows are any mixture of decodes (query length 1) and prompt chunks, in any order.

        query_lens, seq_lens, block_tables: one per request. A block table may be longer than its context.
        dtype: the model's, for the masks.
        """
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        slots = [
            _slots(table, length, block_size) for table, length in zip(block_tables, seq_lens, strict=True)
        ]
        new_slots = np.concatenate([row[-n:] for row, n in zip(slots, query_lens, strict=True)])
        decode_rows = [row for row, n in enumerate(query_lens) if n == 1]
        whole_batch = len(decode_rows) == len(query_lens)
        groups = _group_by_length(decode_rows, seq_lens)
        return cls(
            slot_mapping=torch.from_numpy(new_slots).to(device),
            query_start_loc=starts.tolist(),
            seq_lens=list(seq_lens),
            decodes=[
                _decode_group(
                    None if whole_batch and len(groups) == 1 else starts[rows],
                    [slots[row] for row in rows],
                    device,
                    dtype,
                )
                for rows in groups
            ],
            prefills=[
                _prefill_chunk(int(starts[row]), n, slots[row], device, dtype)
                for row, n in enumerate(query_lens)
                if n > 1
            ],
        )


def _slots(block_table: list[int], length: int, block_size: int) -> np.ndarray:
    """The cache slots of a context, in order: (length,) int64"""
    blocks = np.asarray(block_table[: -(-length // block_size)], dtype=np.int64)
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:length]


def _group_by_length(rows: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Split rows so that padding at most about doubles what a group reads; each group is in batch order."""
    groups: list[list[int]] = []
    limit = 0
    for row in sorted(rows, key=lambda row: seq_lens[row]):
        if seq_lens[row] > limit:
            groups.append([])
            limit = PADDING_FACTOR * seq_lens[row] + PADDING_FREE
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _decode_group(
    rows: np.ndarray | None, slots: list[np.ndarray], device: torch.device | str, dtype: torch.dtype
) -> DecodeGroup:
    lengths = np.array([len(row) for row in slots])
    longest = lengths.max()
    padded = np.stack(
        [np.pad(row, (0, longest - len(row)), constant_values=row[0]) for row in slots]
    )  # (n, L)
    mask = None
    if lengths.min() < longest:
        past_end = torch.from_numpy(np.arange(longest) >= lengths[:, None])  # (n, L)
        mask = torch.zeros(past_end.shape, dtype=dtype).masked_fill_(past_end, float("-inf"))
        mask = mask[:, None, None, :].to(device)  # (n, 1, 1, L)
    return DecodeGroup(
        rows=None if rows is None else torch.from_numpy(rows).to(device),
        slots=torch.from_numpy(padded.reshape(-1)).to(device),
        mask=mask,
    )


def _prefill_chunk(
    start: int, length: int, slots: np.ndarray, device: torch.device | str, dtype: torch.dtype
) -> PrefillChunk:
    context = len(slots) - length
    if context == 0:
        return PrefillChunk(start, start + length, None, None)
    mask = (
        torch.full((length, len(slots)), float("-inf"), dtype=dtype).triu_(context + 1).to(device)
    )  # (n, L)
    return PrefillChunk(start, start + length, torch.from_numpy(slots).to(device), mask)


class Attention(nn.Module):
    """Writes new keys and values to the cache, then attends over each request's context (vLLM: Attention).

    The model runner sets k_cache and v_cache, (num_blocks, block_size, Hkv, D) each. A request only sees the
    slots of its own context, so the cache need not be initialised, and a request's NaN stays its own.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.group_size = self.num_heads // self.num_kv_heads

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: AttentionMetadata
    ) -> torch.Tensor:
        """q: (T, Hq, D) or (T, Hq*D); k, v: (T, Hkv, D) or (T, Hkv*D) -> (T, Hq*D)"""
        tokens = q.shape[0]
        q = q.reshape(tokens, self.num_kv_heads, self.group_size, self.head_size)  # (T, Hkv, G, D)
        k = k.reshape(tokens, self.num_kv_heads, self.head_size)  # (T, Hkv, D)
        v = v.reshape(tokens, self.num_kv_heads, self.head_size)  # (T, Hkv, D)
        self.k_cache.flatten(0, 1).index_copy_(0, attn.slot_mapping, k)
        self.v_cache.flatten(0, 1).index_copy_(0, attn.slot_mapping, v)
        if len(attn.decodes) == 1 and attn.decodes[0].rows is None:
            return self._decode(q, attn.decodes[0])
        output = q.new_empty(tokens, self.num_heads * self.head_size)  # (T, Hq*D)
        for group in attn.decodes:
            output[group.rows] = self._decode(q[group.rows], group)
        for chunk in attn.prefills:
            output[chunk.start : chunk.end] = self._prefill(q, k, v, chunk)
        return output

    def _decode(self, q: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        """q: (n, Hkv, G, D) -> (n, Hq*D). Heads that share a key-value head go as that head's G queries."""
        k = (
            self._gather(self.k_cache, group.slots).unflatten(0, (len(q), -1)).transpose(1, 2)
        )  # (n, Hkv, L, D)
        v = (
            self._gather(self.v_cache, group.slots).unflatten(0, (len(q), -1)).transpose(1, 2)
        )  # (n, Hkv, L, D)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, scale=self.scale
        )  # (n, Hkv, G, D)
        return output.reshape(len(q), -1)  # (n, Hq*D)

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: PrefillChunk
    ) -> torch.Tensor:
        """q: (T, Hkv, G, D); k, v: (T, Hkv, D) -> (n, Hq*D) for the chunk's n tokens"""
        tokens = slice(chunk.start, chunk.end)
        if chunk.slots is None:
            k, v = k[tokens], v[tokens]
        else:
            k, v = (
                self._gather(self.k_cache, chunk.slots),
                self._gather(self.v_cache, chunk.slots),
            )  # (L, Hkv, D)
        # Key-value heads as the batch and their queries as heads: keys are shared by a view, not by copies.
        q = q[tokens].permute(1, 2, 0, 3)  # (Hkv, G, n, D)
        k, v = (
            x.transpose(0, 1)[:, None].expand(-1, self.group_size, -1, -1) for x in (k, v)
        )  # (Hkv, G, L, D)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=self.scale
        )  # (Hkv, G, n, D)
        return output.permute(2, 0, 1, 3).reshape(chunk.end - chunk.start, -1)  # (n, Hq*D)

    def _gather(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """(L,) slots -> (L, Hkv, D)"""
        return cache.flatten(0, 1).index_select(0, slots)
