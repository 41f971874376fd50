"""Attention of single new tokens over a paged cache (flash-decoding).

Stands for vllm/v1/attention/ops/triton_decode_attention.py (v0.22.1).
"""

import functools

import torch
import triton
import triton.language as tl

# Chosen on an H200 (132 multiprocessors): 16-bit contexts with heads of 128 are read 128 tokens at a time. A batch that
# fills fewer than TARGET_PROGRAMS programs has its contexts split.
TILE_BYTES = 32 * 1024  # of keys, and of values; three stages of both fit in shared memory
MOST_TILE_TOKENS = 128
TARGET_PROGRAMS = 264
MAX_SPLITS = 64
# So many splits the last of them puts together. Of more, a program for each head does so sooner.
MOST_MERGED = tl.constexpr(8)
NUM_WARPS = 4
NUM_STAGES = 3

# Below any score, yet a number: infinity minus infinity is none.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _tiles_per_split(seq_len, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """A context's own share, so that a short one leaves whole splits empty instead of filling all a little."""
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, TILE), SPLITS), 1)


@triton.jit
def _tiles_of_split(split, seq_len, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """First tile, and the one after the last; no more than the first where a split is empty."""
    per_split = _tiles_per_split(seq_len, TILE, SPLITS)
    first_tile = split * per_split
    return first_tile, tl.minimum(first_tile + per_split, tl.cdiv(seq_len, TILE))


@triton.jit
def _live_splits(seq_len, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """How many are not empty; of no context the first counts."""
    live = tl.cdiv(tl.cdiv(seq_len, TILE), _tiles_per_split(seq_len, TILE, SPLITS))
    return tl.maximum(live, 1)


@triton.jit
def _read_tile(
    k_ptr, v_ptr, table_ptr, tile, seq_len, cache_slot,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys and values of TILE positions, (TILE, D) each, and which of these are in the context, (TILE,)."""
    position, dim = tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    in_context = position < seq_len
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    offsets = slot[:, None] * cache_slot + dim[None, :]  # (TILE, D)
    # Values past the context weigh nothing, but zero times the NaN of foreign memory would be NaN.
    readable = in_context[:, None] & (dim < D)[None, :]
    k = tl.load(k_ptr + offsets, mask=readable, other=0.0)
    v = tl.load(v_ptr + offsets, mask=readable, other=0.0)
    return k, v, in_context


@triton.jit
def _take_in(scores, v, highest, weights_sum, acc):
    """One more tile of a softmax: scores (G, TILE); highest score, sum of weights (G, 1), weighted values (G, D)."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1, keep_dims=True))
    weights = tl.exp2(scores - new_highest)
    shrink = tl.exp2(highest - new_highest)
    weights_sum = weights_sum * shrink + tl.sum(weights, axis=1, keep_dims=True)
    acc = acc * shrink + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_highest, weights_sum, acc


@triton.jit
def _merge(
    partial_ptr, lse_ptr, first, live, is_query, is_member,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Splits' outputs, weighted by the softmax of their log-sum-exps: (G, D).   first: (G, 1) places of split 0

    All that others have written is read from where all processors see it: this one's own cache may be older.
    """
    split, dim = tl.arange(0, SPLITS)[None, :], tl.arange(0, BLOCK_D)[None, :]
    is_live = is_member & (split < live)
    lse = tl.load(lse_ptr + first + split, mask=is_live, other=LOWEST, cache_modifier=".cg")  # (G, SPLITS)
    highest = tl.max(lse, axis=1, keep_dims=True)  # (G, 1)
    weights_sum = tl.sum(tl.where(is_live, tl.exp2(lse - highest), 0.0), axis=1, keep_dims=True)
    acc = tl.zeros(is_query.shape, tl.float32)
    for some in range(0, live, 2):  # two are on their way at the same time
        for one in tl.static_range(2):
            places, is_other = first + some + one, some + one < live
            of_other = tl.load(
                lse_ptr + places, mask=is_member & is_other, other=LOWEST, cache_modifier=".cg"
            )
            partial = tl.load(
                partial_ptr + places * D + dim, mask=is_query & is_other, other=0.0, cache_modifier=".cg"
            )
            acc += tl.exp2(of_other - highest) * partial
    return acc / tl.where(is_member, weights_sum, 1.0)


# One compiled kernel for tables of any form: a further variant would stall the first step that wants it.
@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["rows_ptr", "block_tables_ptr", "seq_lens_ptr"],
)
def _paged_decode_kernel(
    q_ptr, cache_ptr, rows_ptr, block_tables_ptr, seq_lens_ptr, out_ptr, partial_ptr, lse_ptr, counts_ptr,
    scale,  # of the scores, times log2(e)
    q_row, q_head, cache_slot, cache_head, table_row, out_row,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One kv head of one request over one split of its context; all GROUP queries of the head together.

    Of a few splits the last to end puts all together, always in the same order. It leaves zero where it counts.
    """
    kv_head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    seq_len = tl.load(seq_lens_ptr + request)
    first_tile, last_tile = _tiles_of_split(split, seq_len, TILE, SPLITS)
    if (split > 0) & (first_tile >= last_tile):
        return

    row = tl.load(rows_ptr + request).to(tl.int64)
    member = tl.arange(0, BLOCK_GROUP)[:, None]  # (G, 1)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + member
    is_query = (member < GROUP) & (dim < D)[None, :]
    q = tl.load(q_ptr + row * q_row + head * q_head + dim[None, :], mask=is_query, other=0.0)  # (G, D)

    k_ptr = cache_ptr + kv_head * cache_head
    v_ptr = k_ptr + num_kv_heads * cache_head
    table_ptr = block_tables_ptr + request * table_row
    highest = tl.full((BLOCK_GROUP, 1), LOWEST, tl.float32)
    weights_sum = tl.zeros((BLOCK_GROUP, 1), tl.float32)
    acc = tl.zeros((BLOCK_GROUP, BLOCK_D), tl.float32)
    for tile in range(first_tile, last_tile):
        k, v, in_context = _read_tile(
            k_ptr, v_ptr, table_ptr, tile, seq_len, cache_slot, D, BLOCK_D, BLOCK_SIZE, TILE
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (G, TILE)
        scores = tl.where(in_context[None, :], scores, float("-inf"))
        highest, weights_sum, acc = _take_in(scores, v, highest, weights_sum, acc)

    # A padded row has no context: its output is zeros, and split 0's stands for all.
    weights_sum = tl.where(weights_sum == 0.0, 1.0, weights_sum)
    output = acc / weights_sum  # (G, D)
    out_ptrs = out_ptr + row * out_row + head * D + dim[None, :]
    live = 1 if SPLITS == 1 else _live_splits(seq_len, TILE, SPLITS)
    if (live == 1) & (SPLITS <= MOST_MERGED):
        tl.store(out_ptrs, output, mask=is_query)
    else:
        first = (request * num_kv_heads * GROUP + head).to(tl.int64) * SPLITS  # (G, 1) partials of a head
        tl.store(partial_ptr + (first + split) * D + dim[None, :], output, mask=is_query)
        tl.store(lse_ptr + first + split, highest + tl.log2(weights_sum), mask=member < GROUP)
        if SPLITS <= MOST_MERGED:
            tl.debug_barrier()  # the whole partial before its count
            count_ptr = counts_ptr + request * num_kv_heads + kv_head
            if tl.atomic_add(count_ptr, 1, sem="acq_rel") == live - 1:
                output = _merge(
                    partial_ptr, lse_ptr, first, live, is_query, member < GROUP, D, BLOCK_D, SPLITS
                )
                tl.store(out_ptrs, output, mask=is_query)
                tl.store(count_ptr, 0)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr"])
def _reduce_splits_kernel(
    partial_ptr, lse_ptr, rows_ptr, seq_lens_ptr, out_ptr, out_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of one request: its splits' outputs, weighted by the softmax of their log-sum-exps."""
    head, request = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    live = _live_splits(seq_len, TILE, SPLITS)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    first = (request * tl.num_programs(0) + head).to(tl.int64) * SPLITS
    lse = tl.load(lse_ptr + first + split, mask=split < live, other=float("-inf"))  # (SPLITS,)
    readable = (split < live)[:, None] & (dim < D)[None, :]
    partial_ptrs = partial_ptr + (first + split)[:, None] * D + dim[None, :]
    partial = tl.load(partial_ptrs, mask=readable, other=0.0)  # (SPLITS, D)
    weights = tl.exp2(lse - tl.max(lse))
    output = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights)  # (D,)
    row = tl.load(rows_ptr + request).to(tl.int64)
    tl.store(out_ptr + row * out_row + head * D + dim, output, mask=dim < D)


def paged_decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    decode_rows: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
) -> torch.Tensor:
    """Each decode's token attends over its context; deterministic, and fit for a CUDA graph.

    Calls on a device must run one after the other: they count in the same place.

    q: (T, Hq, D), row stride of any width, heads' elements contiguous
    kv_cache: (num_blocks, block_size, 2 Hkv, D) contiguous, new tokens included
    decode_rows: (N,) int32 rows of q; block_tables: (N, W) int32
    seq_lens: (N,) int32; 0 reads nothing and gives zeros
    max_seq_len: no context is longer; it sets how many splits are launched, not what they read
    -> (T, Hq * D); rows that are nobody's decode are left unwritten
    """
    tokens, num_heads, size = q.shape
    requests, num_kv_heads = len(seq_lens), kv_cache.shape[2] // 2
    group = num_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(size))
    tile = max(16, min(MOST_TILE_TOKENS, TILE_BYTES // (block_d * q.element_size())))
    splits = num_splits(requests * num_kv_heads, triton.cdiv(max_seq_len, tile))
    out = torch.empty(tokens, num_heads * size, dtype=q.dtype, device=q.device)
    partial = lse = counts = out
    if splits > 1:
        counts = _counts(triton.next_power_of_2(requests * num_kv_heads), q.device)
        partial = torch.empty(requests, num_heads, splits, size, dtype=torch.float32, device=q.device)
        lse = torch.empty(requests, num_heads, splits, dtype=torch.float32, device=q.device)
    _paged_decode_kernel[num_kv_heads, requests, splits](
        q, kv_cache, decode_rows, block_tables, seq_lens, out, partial, lse, counts,
        scale * 1.4426950408889634,
        q.stride(0), q.stride(1), kv_cache.stride(1), kv_cache.stride(2), block_tables.stride(0), out.stride(0),
        GROUP=group, BLOCK_GROUP=max(16, triton.next_power_of_2(group)), D=size, BLOCK_D=block_d,
        BLOCK_SIZE=kv_cache.shape[1], TILE=tile, SPLITS=splits,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    if splits > MOST_MERGED.value:
        _reduce_splits_kernel[num_heads, requests](
            partial, lse, decode_rows, seq_lens, out, out.stride(0),
            D=size, BLOCK_D=block_d, TILE=tile, SPLITS=splits,
        )  # fmt: skip
    return out


@functools.cache
def _counts(size: int, device: torch.device) -> torch.Tensor:
    """Of each kv head of each request, how many splits have ended; zeros between launches.   (size,) int32"""
    return torch.zeros(size, dtype=torch.int32, device=device)


def num_splits(programs: int, max_tiles: int) -> int:
    """Into how many parts to cut each context: a power of two that about fills the GPU, 1 if it is full already."""
    wanted = min(TARGET_PROGRAMS // max(programs, 1), max_tiles, MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)
