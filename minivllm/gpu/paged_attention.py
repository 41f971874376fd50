"""Attention on the GPU's fast path: kernels for decodes, flash attention for prompts.

Stands for vllm/v1/attention/backends/triton_attn.py and flash_attn.py (v0.22.1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class PrefillBatch:
    """The P requests of a step with more than one new token, and their N tokens.

    token_rows: (N,) int64 rows of their tokens in the batch; None when the batch is just these, in order
    cu_seqlens_q, cu_seqlens_k: (P + 1,) int32 offsets of their new tokens, and of their contexts
    max_seqlen_q, max_seqlen_k: the longest of each
    context_slots: (sum of contexts,) int64 cache slots to gather, new tokens' included; None when no request
        has a context beyond its new tokens
    """

    token_rows: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    context_slots: torch.Tensor | None


@dataclass(frozen=True)
class TiledAttentionMetadata:
    """Who attends to what in one step, prompts and decodes alike: all of it on the device, fit for a CUDA graph.

    slot_mapping: (T,) int64, as in `PagedAttentionMetadata`
    tiles: (4, capacity) int32, as `mixed_attention` wants them; every token is in one, padding too
    block_tables: (P, W) int32 blocks of each request's context
    """

    slot_mapping: torch.Tensor
    tiles: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def build(
        cls,
        query_lens: list[int],
        seq_lens: list[int],
        block_tables: list[list[int]],
        block_size: int,
        tile_tokens: int,
        device: torch.device | str = "cpu",
    ) -> "TiledAttentionMetadata":
        """The first four as `PagedAttentionMetadata.build`.   tile_tokens: most tokens of a tile"""
        queries, contexts = np.array(query_lens), np.array(seq_lens)
        tables = _tables(contexts, block_tables, block_size)  # (P, W)
        starts = contexts - queries
        return cls(
            torch.from_numpy(_slots(tables, starts, queries, block_size)).to(device),
            _int32(query_tiles(queries, starts, tile_tokens), device),
            _int32(tables, device),
        )


@dataclass(frozen=True)
class PagedAttentionMetadata:
    """Who attends to what in one step, for the fast path (vLLM: TritonAttentionMetadata).

    slot_mapping: (T,) int64 cache slot (block * block_size + offset) each new token is written to. Padding has
        slot 0, in the null block that is never handed out.
    decode_rows: (D,) int32 token row of each decode (query length 1)
    block_tables: (D, W) int32 blocks of each decode's context
    seq_lens: (D,) int32 context lengths, new tokens included; 0 is padding, which reads nothing and gives zeros
    max_seq_len: no decode's context is longer; only launch parameters depend on it
    prefill: the rest of the batch, or None
    """

    slot_mapping: torch.Tensor
    decode_rows: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    prefill: PrefillBatch | None

    @classmethod
    def build(
        cls,
        query_lens: list[int],
        seq_lens: list[int],
        block_tables: list[list[int]],
        block_size: int,
        device: torch.device | str = "cpu",
        max_seq_len: int | None = None,
    ) -> "PagedAttentionMetadata":
        """Rows are any mixture of decodes (query length 1) and prompt chunks, in any order.

        query_lens, seq_lens, block_tables: one per request. A block table may be longer than its context.
        max_seq_len: None = the longest context among the decodes. The same number at every step keeps launches the
            same, so that no step has to wait for a kernel to be compiled
        """
        queries, contexts = np.array(query_lens), np.array(seq_lens)
        tables = _tables(contexts, block_tables, block_size)  # (P, W)
        starts = np.cumsum(queries) - queries
        decodes, prefills = np.flatnonzero(queries == 1), np.flatnonzero(queries > 1)
        slot_mapping = _slots(tables, contexts - queries, queries, block_size)  # (T,)
        prefill = None
        if len(prefills):
            chosen = starts[prefills], queries[prefills], contexts[prefills], tables[prefills]
            prefill = _prefill_batch(*chosen, block_size, device, alone=not len(decodes))
        return cls(
            torch.from_numpy(slot_mapping).to(device),
            _int32(starts[decodes], device),
            _int32(tables[decodes], device),
            _int32(contexts[decodes], device),
            int(contexts[decodes].max(initial=0)) if max_seq_len is None else max_seq_len,
            prefill,
        )


def _prefill_batch(
    starts: np.ndarray,
    queries: np.ndarray,
    contexts: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    device: torch.device | str,
    alone: bool,
) -> PrefillBatch:
    token_rows = context_slots = None
    if not alone:
        token_rows = torch.from_numpy(_ranges(starts, queries)).to(device)
    if (contexts > queries).any():
        slots = _slots(tables, np.zeros_like(contexts), contexts, block_size)
        context_slots = torch.from_numpy(slots).to(device)
    return PrefillBatch(
        token_rows,
        _int32(np.concatenate(([0], np.cumsum(queries))), device),
        _int32(np.concatenate(([0], np.cumsum(contexts))), device),
        int(queries.max()),
        int(contexts.max()),
        context_slots,
    )


def query_tiles(query_lens: np.ndarray, starts: np.ndarray, tile_tokens: int) -> np.ndarray:
    """Requests' tokens, end to end, cut into tiles of at most `tile_tokens`.

    query_lens, starts   (P,) how many each has, and the position of its first

    Returns (4, tiles), as `mixed_attention` wants them.
    """
    counts = -(-query_lens // tile_tokens)
    owners = np.repeat(np.arange(len(counts)), counts)
    done = (np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]) * tile_tokens
    first_rows = (np.cumsum(query_lens) - query_lens)[owners] + done
    lengths = np.minimum(query_lens[owners] - done, tile_tokens)
    return np.stack([owners, first_rows, lengths, starts[owners] + done])


def _tables(contexts: np.ndarray, block_tables: list[list[int]], block_size: int) -> np.ndarray:
    """(P, W) of the longest context's width; zeros past the shorter ones"""
    widest = -(-int(contexts.max()) // block_size)
    return np.array([table[:widest] + [0] * (widest - len(table)) for table in block_tables])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[i], starts[i] + 1, ... of each i, lengths[i] numbers, one after the other: (sum of lengths,) int64"""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


def _slots(tables: np.ndarray, starts: np.ndarray, lengths: np.ndarray, block_size: int) -> np.ndarray:
    """The cache slots of lengths[i] positions from starts[i] on, of each request i: (sum of lengths,) int64"""
    positions = _ranges(starts, lengths)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return tables[rows, positions // block_size] * block_size + positions % block_size


def _int32(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


def paged_attention(
    heads: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    scale: float,
    attn: PagedAttentionMetadata | TiledAttentionMetadata,
    rotate: Callable[..., None] | None = None,
) -> torch.Tensor:
    """Rotate q and k in place, write the cache, attend.

    heads: (T, Hq + 2 Hkv, D) queries, keys, values; row stride of any width -> (T, Hq * D)
    rotary: cosines and sines, (T, 1, D) each
    kv_cache: (num_blocks, block_size, 2 Hkv, D) contiguous
    rotate: rotates and writes the cache in place of `rotary_and_cache`, which None stands for
    """
    # Imported here, so that a machine without Triton still serves on its CPU.
    from minivllm.gpu.kernels.attention import paged_decode_attention
    from minivllm.gpu.kernels.mixed_attention import mixed_attention
    from minivllm.gpu.kernels.rotary import rotary_and_cache

    (rotate or rotary_and_cache)(heads, *rotary, attn.slot_mapping, kv_cache)
    if isinstance(attn, TiledAttentionMetadata):
        q = heads[:, : heads.shape[1] - kv_cache.shape[2]]  # (T, Hq, D)
        return mixed_attention(q, kv_cache, attn.tiles, attn.block_tables, scale)  # (T, Hq * D)
    prefill = attn.prefill
    if prefill is not None:
        prompts = prefill_attention(heads, kv_cache, scale, prefill)  # (N, Hq * D)
        if prefill.token_rows is None:
            return prompts
    q = heads[:, : heads.shape[1] - kv_cache.shape[2]]  # (T, Hq, D)
    output = paged_decode_attention(
        q, kv_cache, attn.decode_rows, attn.block_tables, attn.seq_lens, attn.max_seq_len, scale
    )  # (T, Hq * D)
    return output if prefill is None else output.index_copy_(0, prefill.token_rows, prompts)


def prefill_attention(
    heads: torch.Tensor, kv_cache: torch.Tensor, scale: float, prefill: PrefillBatch
) -> torch.Tensor:
    """Causal attention of the prefills' N tokens, each request's last token seeing its whole context.

    heads: (T, Hq + 2 Hkv, D), rotated, and in the cache already -> (N, Hq * D)
    """
    if prefill.token_rows is not None:
        heads = heads.index_select(0, prefill.token_rows)  # (N, Hq + 2 Hkv, D)
    kv_heads = kv_cache.shape[2] // 2
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if prefill.context_slots is not None:
        kv = kv_cache.flatten(0, 1).index_select(0, prefill.context_slots)  # (sum of contexts, 2 Hkv, D)
        k, v = kv.chunk(2, dim=1)
    if not _flash_attention_takes(q):
        return _attend_one_by_one(q, k, v, scale, prefill)
    # It reads 16 bytes at a time, so rows must begin at multiples of that, as those of a copy do.
    q, k, v = (x if x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v))
    output = torch.ops.aten._flash_attention_forward(
        q, k, v, prefill.cu_seqlens_q, prefill.cu_seqlens_k, prefill.max_seqlen_q, prefill.max_seqlen_k,
        0.0, True, False, scale=scale,
    )[0]  # fmt: skip
    return output.flatten(1)  # (N, Hq * D)


def _flash_attention_takes(q: torch.Tensor) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and half and q.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(q.device)[0] >= 8


def _attend_one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, prefill: PrefillBatch
) -> torch.Tensor:
    """What flash attention computes, where it does not run."""
    outputs = []
    q_lens, k_lens = prefill.cu_seqlens_q.diff().tolist(), prefill.cu_seqlens_k.diff().tolist()
    for request in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens)):
        queries, keys, values = (x.transpose(0, 1) for x in request)  # (heads, n or L, D)
        n, length = queries.shape[1], keys.shape[1]
        seen = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)  # (n, L)
        output = F.scaled_dot_product_attention(
            queries, keys, values, seen, scale=scale, enable_gqa=True
        )  # (Hq, n, D)
        outputs.append(output.transpose(0, 1).flatten(1))  # (n, Hq * D)
    return torch.cat(outputs)
