"""Attention over a paged KV cache. Stands for vllm/model_executor/layers/attention (v0.22.1)."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.rotary import apply_rotary

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

    For any device and dtype, by PyTorch's own attention.

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
        slot_mapping = np.empty(starts[-1], dtype=np.int64)
        groups = _group_by_length([row for row, n in enumerate(query_lens) if n == 1], seq_lens)
        decodes, prefills = [], []
        for rows in groups:
            lengths = np.array([seq_lens[row] for row in rows])
            slots = _slots([block_tables[row] for row in rows], lengths, block_size)  # (n, L)
            slot_mapping[starts[rows]] = slots[np.arange(len(rows)), lengths - 1]
            whole_batch = len(rows) == len(query_lens)
            decodes.append(
                _decode_group(None if whole_batch else starts[rows], slots, lengths, device, dtype)
            )
        for row, n in enumerate(query_lens):
            if n > 1:
                slots = _slots([block_tables[row]], np.array([seq_lens[row]]), block_size)[0]  # (L,)
                slot_mapping[starts[row] : starts[row + 1]] = slots[-n:]
                prefills.append(_prefill_chunk(int(starts[row]), n, slots, device, dtype))
        slot_mapping = torch.from_numpy(slot_mapping).to(device)
        return cls(slot_mapping, starts.tolist(), list(seq_lens), decodes, prefills)


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


def _slots(block_tables: list[list[int]], lengths: np.ndarray, block_size: int) -> np.ndarray:
    """The cache slots of n contexts in order, each padded with its own first slot: (n, L) int64"""
    longest = int(lengths.max())
    blocks = -(-longest // block_size)
    tables = np.array([table[:blocks] + table[:1] * (blocks - len(table)) for table in block_tables])
    slots = tables[:, :, None] * block_size + np.arange(block_size)  # (n, blocks, block_size)
    slots = slots.reshape(len(tables), -1)[:, :longest]  # (n, L)
    return np.where(np.arange(longest) < lengths[:, None], slots, slots[:, :1])


def _decode_group(
    rows: np.ndarray | None,
    slots: np.ndarray,
    lengths: np.ndarray,
    device: torch.device | str,
    dtype: torch.dtype,
) -> DecodeGroup:
    longest = slots.shape[1]
    mask = None
    if lengths.min() < longest:
        padding = torch.from_numpy(np.arange(longest) >= lengths[:, None])  # (n, L)
        mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf"))
        mask = mask[:, None, None, :].to(device)  # (n, 1, 1, L)
    return DecodeGroup(
        rows=None if rows is None else torch.from_numpy(rows).to(device),
        slots=torch.from_numpy(slots.reshape(-1)).to(device),
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
    """Rotates, writes new keys and values to the cache, attends over each request's context (vLLM: Attention).

    The model runner gives every layer its cache with `bind_kv_cache`. A request only sees the slots of its
    own context, so the cache need not be initialised, and a request's NaN stays its own.
    """

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.group_size = self.num_heads // self.num_kv_heads

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """(num_blocks, block_size, 2 * Hkv, D): keys and values side by side, so one gather reads both"""
        return (num_blocks, block_size, 2 * self.num_kv_heads, self.head_size)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Use this memory, of `kv_cache_shape`, from now on (vLLM: bind_kv_cache)."""
        self.kv_cache = kv_cache
        self.k_cache, self.v_cache = kv_cache.chunk(2, dim=2)  # (num_blocks, block_size, Hkv, D) each
        slots = kv_cache.flatten(0, 1)  # (slots, 2 Hkv, D)
        self._k_slots, self._v_slots = slots.chunk(2, dim=1)  # (slots, Hkv, D) each
        self._slots = slots.flatten(1)  # (slots, 2 Hkv * D)

    def forward(
        self,
        heads: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attn: AttentionMetadata,
    ) -> torch.Tensor:
        """heads: (T, Hq + 2 Hkv, D), queries, keys, values -> (T, Hq*D)

        rotary: cosines and sines, as `apply_rotary` wants them.
        """
        qk, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        qk = apply_rotary(qk, *rotary)  # (T, Hq + Hkv, D)
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)  # (T, Hq, D), (T, Hkv, D)
        return self.attend(q, k, v, attn)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: AttentionMetadata
    ) -> torch.Tensor:
        """q: (T, Hq, D), k: (T, Hkv, D), rotated; v: (T, Hkv, D) -> (T, Hq*D)"""
        self._k_slots.index_copy_(0, attn.slot_mapping, k)
        self._v_slots.index_copy_(0, attn.slot_mapping, v)
        q = q.unflatten(1, (self.num_kv_heads, self.group_size))  # (T, Hkv, G, D)
        if not attn.prefills and len(attn.decodes) == 1:
            return self._decode(q, attn.decodes[0])
        output = q.new_empty(len(q), self.num_heads * self.head_size)  # (T, Hq*D)
        for group in attn.decodes:
            output[group.rows] = self._decode(q[group.rows], group)
        for chunk in attn.prefills:
            output[chunk.start : chunk.end] = self._prefill(q, k, v, chunk)
        return output

    def _decode(self, q: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        """q: (n, Hkv, G, D) -> (n, Hq*D). Heads that share a key-value head go as that head's G queries."""
        k, v = self._gather(group.slots, len(q))  # (n, Hkv, L, D) each
        output = F.scaled_dot_product_attention(q, k, v, group.mask, scale=self.scale)  # (n, Hkv, G, D)
        return output.reshape(len(q), -1)  # (n, Hq*D)

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: PrefillChunk
    ) -> torch.Tensor:
        """q: (T, Hkv, G, D); k, v: (T, Hkv, D) -> (n, Hq*D) for the chunk's n tokens"""
        tokens = slice(chunk.start, chunk.end)
        if chunk.slots is None:
            k, v = k[tokens].transpose(0, 1), v[tokens].transpose(0, 1)  # (Hkv, L, D) each
        else:
            k, v = (x[0] for x in self._gather(chunk.slots, 1))  # (Hkv, L, D) each
        # Key-value heads as the batch, their queries as heads: keys are shared by a view, not by copies.
        q = q[tokens].permute(1, 2, 0, 3)  # (Hkv, G, n, D)
        k, v = (x[:, None].expand(-1, self.group_size, -1, -1) for x in (k, v))  # (Hkv, G, L, D)
        causal = chunk.mask is None
        output = F.scaled_dot_product_attention(q, k, v, chunk.mask, is_causal=causal, scale=self.scale)
        return output.permute(2, 0, 1, 3).reshape(chunk.end - chunk.start, -1)  # (n, Hq*D)

    def _gather(self, slots: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """slots: (n * L,) of n requests -> k, v: (n, Hkv, L, D)"""
        kv = self._slots.index_select(0, slots)  # (n * L, 2 Hkv * D)
        kv = kv.view(requests, -1, 2 * self.num_kv_heads, self.head_size).transpose(1, 2)  # (n, 2 Hkv, L, D)
        return kv[:, : self.num_kv_heads], kv[:, self.num_kv_heads :]
