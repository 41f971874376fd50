"""Attention over a paged cache, of prompts and single tokens alike.

Stands for vllm/v1/attention/ops/triton_unified_attention.py and triton_decode_attention.py (v0.22.1).
"""

import functools

import torch
import triton
import triton.language as tl

# A batch of single tokens that fills fewer programs than this has its contexts split (flash-decoding). An H100 and an
# H200 have 132 multiprocessors.
TARGET_PROGRAMS = 264
MAX_SPLITS = 64

# Below any score, yet a number: infinity minus infinity is none.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _tiles_per_split(seq_len, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """A context's own share, so that a short one leaves whole splits empty instead of filling all a little."""
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, TILE), SPLITS), 1)


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
    return k, v, position, in_context


@triton.jit
def _take_in(scores, v, highest, weights_sum, acc):
    """One more tile of a softmax: scores (M, TILE); highest score, sum of weights (M, 1), weighted values (M, D)."""
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
    """Splits' outputs, weighted by the softmax of their log-sum-exps: (M, D).   first: (M, 1) places of split 0

    All that others have written is read from where all processors see it: this one's own cache may be older.
    """
    split, dim = tl.arange(0, SPLITS)[None, :], tl.arange(0, BLOCK_D)[None, :]
    is_live = is_member & (split < live)
    lse = tl.load(lse_ptr + first + split, mask=is_live, other=LOWEST, cache_modifier=".cg")  # (M, SPLITS)
    highest = tl.max(lse, axis=1, keep_dims=True)  # (M, 1)
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
    do_not_specialize=["table_row", "capacity"],
    do_not_specialize_on_alignment=["tiles_ptr", "block_tables_ptr"],
)
def _paged_attention_kernel(
    q_ptr,  # (T, Hq, D)
    cache_ptr,  # (slots, 2 Hkv, D)
    tiles_ptr,  # (4, capacity) request, first row, rows, position of the first
    block_tables_ptr,  # (P, W)
    out_ptr,  # (T, Hq * D)
    partial_ptr,  # (tiles, Hkv, ROWS, SPLITS, D)
    lse_ptr,  # (tiles, Hkv, ROWS, SPLITS)
    counts_ptr,  # (tiles, Hkv) zeros
    scale,  # of the scores, times log2(e)
    capacity,
    q_row,
    q_head,
    cache_slot,
    cache_head,
    table_row,
    out_row,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # positions of the context read at a time
    SPLITS: tl.constexpr,
):
    """One kv head of one tile of queries over one split of their context.

    The GROUP queries of the head are rows beside those of other tokens. The last split to end puts all together, always
    in the same order, and leaves zero where it counts.
    """
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    length = tl.load(tiles_ptr + 2 * capacity + tile)
    if length == 0:
        return
    request = tl.load(tiles_ptr + tile).to(tl.int64)
    first_row = tl.load(tiles_ptr + capacity + tile).to(tl.int64)
    first_position = tl.load(tiles_ptr + 3 * capacity + tile)
    seq_len = first_position + length  # padding stands before position 0, and so has no context
    first_kv, last_kv = 0, tl.cdiv(seq_len, TILE)
    if SPLITS > 1:
        per_split = _tiles_per_split(seq_len, TILE, SPLITS)
        first_kv = split * per_split
        last_kv = tl.minimum(first_kv + per_split, last_kv)
        if (split > 0) & (first_kv >= last_kv):
            return

    member, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token, head = member // GROUP, kv_head * GROUP + member % GROUP  # (ROWS,)
    row = first_row + token
    is_member = (token < length)[:, None]
    is_query = is_member & (dim < D)[None, :]
    q_ptrs = q_ptr + (row * q_row + head * q_head)[:, None] + dim[None, :]
    q = tl.load(q_ptrs, mask=is_query, other=0.0)  # (ROWS, D)
    last_seen = first_position + token  # (ROWS,)

    k_ptr = cache_ptr + kv_head * cache_head
    v_ptr = k_ptr + num_kv_heads * cache_head
    table_ptr = block_tables_ptr + request * table_row
    highest = tl.full((ROWS, 1), LOWEST, tl.float32)
    weights_sum = tl.zeros((ROWS, 1), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for kv_tile in range(first_kv, last_kv):
        k, v, position, in_context = _read_tile(
            k_ptr, v_ptr, table_ptr, kv_tile, seq_len, cache_slot, D, BLOCK_D, BLOCK_SIZE, TILE
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (ROWS, TILE)
        seen = in_context[None, :] & (position[None, :] <= last_seen[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        highest, weights_sum, acc = _take_in(scores, v, highest, weights_sum, acc)

    # A row without a context has zeros, and split 0's stand for all.
    weights_sum = tl.where(weights_sum == 0.0, 1.0, weights_sum)
    output = acc / weights_sum  # (ROWS, D)
    out_ptrs = out_ptr + (row * out_row + head * D)[:, None] + dim[None, :]
    live = 1 if SPLITS == 1 else _live_splits(seq_len, TILE, SPLITS)
    if live == 1:
        tl.store(out_ptrs, output, mask=is_query)
    elif SPLITS > 1:
        count = tile * num_kv_heads + kv_head
        first = ((count * ROWS + member).to(tl.int64) * SPLITS)[:, None]  # (ROWS, 1) split 0's of a row
        tl.store(partial_ptr + (first + split) * D + dim[None, :], output, mask=is_query)
        tl.store(lse_ptr + first + split, highest + tl.log2(weights_sum), mask=is_member)
        tl.debug_barrier()  # the whole partial before its count
        if tl.atomic_add(counts_ptr + count, 1, sem="acq_rel") == live - 1:
            output = _merge(partial_ptr, lse_ptr, first, live, is_query, is_member, D, BLOCK_D, SPLITS)
            tl.store(out_ptrs, output, mask=is_query)
            tl.store(counts_ptr + count, 0)


def attention_tiles(tile_tokens: int, group: int, size: int, itemsize: int) -> tuple[int, int]:
    """Rows of queries that a program has, and how many positions of their context it reads at a time.

    tile_tokens: most tokens of a tile, group: query heads of a kv head, size: D, itemsize: bytes of a number
    """
    rows = max(16, triton.next_power_of_2(tile_tokens * group))
    if tile_tokens > 1:
        return rows, max(16, 64 // itemsize)
    # Three stages of keys and values, 32 KiB each, fit in shared memory.
    row_bytes = max(16, triton.next_power_of_2(size)) * itemsize
    return rows, max(16, min(128, 32 * 1024 // row_bytes))


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    tiles: torch.Tensor,
    tile_tokens: int,
    block_tables: torch.Tensor,
    max_seq_len: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of every tile's tokens over their request's context; deterministic, fit for a CUDA graph.

    Contexts are split where tiles are single tokens and few. Calls on a device must run one after the other: they
    count in the same place.

    q             (T, Hq, D), row stride of any width, heads' elements contiguous
    kv_cache      (num_blocks, block_size, 2 Hkv, D) contiguous, new tokens included
    tiles         (4, capacity) int32 of each tile: its request, its first row of q, how many rows (0 = no tile), and
                  the first one's position. Rows at positions below 0 read nothing and give zeros
    tile_tokens   no tile has more rows
    block_tables  (P, W) int32
    max_seq_len   no context is longer; it sets how many splits are launched, not what they read
    out           (T, Hq * D), of which rows in no tile are left as they are
    """
    _, num_heads, size = q.shape
    count, num_kv_heads = tiles.shape[1], kv_cache.shape[2] // 2
    group = num_heads // num_kv_heads
    rows, tile = attention_tiles(tile_tokens, group, size, q.element_size())
    splits = 1
    if tile_tokens == 1:
        splits = num_splits(count * num_kv_heads, triton.cdiv(max_seq_len, tile))
    partial = lse = counts = out
    if splits > 1:
        counts = _counts(triton.next_power_of_2(count * num_kv_heads), q.device)
        partial = torch.empty(count, num_kv_heads, rows, splits, size, dtype=torch.float32, device=q.device)
        lse = torch.empty(count, num_kv_heads, rows, splits, dtype=torch.float32, device=q.device)
    _paged_attention_kernel[num_kv_heads, count, splits](
        q,
        kv_cache,
        tiles,
        block_tables,
        out,
        partial,
        lse,
        counts,
        scale * 1.4426950408889634,
        tiles.stride(0),
        q.stride(0),
        q.stride(1),
        kv_cache.stride(1),
        kv_cache.stride(2),
        block_tables.stride(0),
        out.stride(0),
        GROUP=group,
        ROWS=rows,
        D=size,
        BLOCK_D=max(16, triton.next_power_of_2(size)),
        BLOCK_SIZE=kv_cache.shape[1],
        TILE=tile,
        SPLITS=splits,
        num_warps=4,
        num_stages=3,
    )


@functools.cache
def _counts(size: int, device: torch.device) -> torch.Tensor:
    """Of each kv head of each tile, how many splits have ended; zeros between launches.   (size,) int32"""
    return torch.zeros(size, dtype=torch.int32, device=device)


def num_splits(programs: int, max_tiles: int) -> int:
    """Into how many parts to cut each context: a power of two that about fills the GPU, 1 if it is full already."""
    wanted = min(TARGET_PROGRAMS // max(programs, 1), max_tiles, MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)
