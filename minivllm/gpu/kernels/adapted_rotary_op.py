"""Rotary embedding and the write to the KV cache, what adapters add to q, k and v included: these are read once.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM rotates and writes the cache.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_expand_op import read_h
from minivllm.gpu.kernels.paged_pieces import sum_dtype
from minivllm.gpu.kernels.paged_tuning import LEAST_BLOCK_RANKS, AdaptedRotaryTiles, adapted_rotary_tiles
from minivllm.gpu.kernels.tile_rows import programs_of_rows, rows_of_tile
from minivllm.gpu.kernels.update import Update, begins_of_b, live_rank, read_ranks
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.tuning import can_overlap


@triton.jit
def _of_part(part, three):
    """One of q's, k's and v's."""
    return tl.where(part == 0, three[0], tl.where(part == 1, three[1], three[2]))


@triton.jit
def _read_halves(
    begins, rank, live, table_ptr, first_column, pair, is_pair,
    R: tl.constexpr, COLUMN_STRIDE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """B of some ranks, of the first and of the second half of one head: (ranks, pairs) each"""
    first = begins[:, None] + ((first_column + pair) * COLUMN_STRIDE)[None, :]
    is_column = is_pair[None, :]
    second = first + HALF * COLUMN_STRIDE
    return (
        read_ranks(first, rank, live, R, table_ptr, is_column, 0),
        read_ranks(second, rank, live, R, table_ptr, is_column, 0),
    )


# These numbers differ between steps, or engines: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["slice_rows", "capacity", "tile_count", "tokens", "ranks_row", "table_row"])
def _adapted_rotary_kernel(
    h_ptr,  # (3, T, R), or of each slot one: see the strides
    b_ptrs,  # in which B of q, k and v lies
    heads_ptr,  # (T, Hq + 2 Hkv, D)
    cos_ptr,  # (T, D)
    sin_ptr,
    slot_mapping_ptr,  # (T,) where in the cache each row goes
    cache_ptr,  # (slots, 2 Hkv, D)
    rows_ptr,  # (T,) rows by slot, base rows last
    tiles_ptr,  # (3, capacity) adapter, first row, rows
    table_ptr,  # (S, G) pages, or None
    ranks_ptr,  # (3, S) live ranks, or None: all R
    capacity,
    tile_count,
    tokens,
    ranks_row,
    table_row,
    b_firsts,  # where B begins
    slot_strides,
    rank_strides,
    slice_rows,  # from one slice's h to the next, as so many ranks of R: known to be aligned as R is
    h_row_stride,
    h_slot_stride,
    heads_row,
    cos_row,
    sin_row,
    cache_slot,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # of D
    R: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # of ranks
    PAGE_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # of a program
    HEADS: tl.constexpr,  # of a program
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,  # no fewer than HALF
    BLOCK_TILES: tl.constexpr,  # no fewer than tiles
    SUM: tl.constexpr,  # dtype of sums
):
    """One program: some rows of one tile, some heads of q, of k or of v, one after the other.

    Axis 0 of the grid counts tiles, and past these blocks of base rows. Sums and rotations are float32 and rounded
    once. Nothing past a live rank is read. Of v, rows that no adapter changes are not written in place.
    """
    share: tl.constexpr = BLOCK_ROWS // ROWS
    of_tile, block = tl.program_id(0), tl.program_id(1)
    tile = of_tile // share
    adapter, first_place, length = rows_of_tile(
        tiles_ptr, capacity, tile, tile_count, tokens, BLOCK_ROWS, BLOCK_TILES
    )
    done = of_tile % share * ROWS
    if length <= done:
        if OVERLAP:  # or what comes after this kernel might not wait for what came before it
            tl.extra.cuda.gdc_wait()
        return
    place = done + tl.arange(0, ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first_place + place, mask=is_row, other=0).to(tl.int64)  # (ROWS,)

    q_blocks: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    part = (block >= q_blocks).to(tl.int32) + (block >= q_blocks + kv_blocks).to(tl.int32)  # 0 q, 1 k, 2 v
    first_head = (block - _of_part(part, (0, q_blocks, q_blocks + kv_blocks))) * HEADS  # in its part
    head_count = tl.where(part == 0, NUM_HEADS, NUM_KV_HEADS)
    heads_before = _of_part(part, (0, NUM_HEADS, NUM_HEADS + NUM_KV_HEADS))

    live = 0
    if tile < tile_count:
        ranks_ptr_of_part = None if ranks_ptr is None else ranks_ptr + part * ranks_row
        live = live_rank(ranks_ptr_of_part, adapter, R)
    b_ptr = _of_part(part, b_ptrs) + _of_part(part, b_firsts)
    slot_stride, rank_stride = _of_part(part, slot_strides), _of_part(part, rank_strides)
    h_ptr += part * slice_rows * R + adapter * h_slot_stride
    rank, pair = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK)
    is_pair = pair < HALF
    if ONE_BLOCK:  # straight on, so that all loads are under way together
        begins = begins_of_b(
            b_ptr, table_ptr, adapter, table_row, slot_stride, rank_stride, rank, rank < R, PAGE_RANKS
        )
        b_first, b_second = _read_halves(
            begins, rank, live, table_ptr, first_head * 2 * HALF, pair, is_pair, R, COLUMN_STRIDE, HALF
        )
    # Made at the beginning of a step, as tiles are. Values stay as they are.
    turned = is_row[:, None] & is_pair[None, :] & (part < 2)
    cos = tl.load(cos_ptr + rows[:, None] * cos_row + pair[None, :], mask=turned, other=1.0).to(SUM)
    # The sines' second half is the plain one; the first holds the minus of rotate-half.
    sin = tl.load(sin_ptr + rows[:, None] * sin_row + HALF + pair[None, :], mask=turned, other=0.0).to(SUM)
    slot = tl.load(slot_mapping_ptr + rows, mask=is_row & (part > 0), other=0).to(tl.int64)
    if OVERLAP:  # the kernels ahead may still run until here
        tl.extra.cuda.gdc_wait()
    if ONE_BLOCK:
        h = read_h(h_ptr, rows, is_row, rank, live, h_row_stride)

    for i in tl.static_range(HEADS):
        head = first_head + i
        inside = is_row[:, None] & (is_pair & (head < head_count))[None, :]
        in_heads = heads_ptr + rows[:, None] * heads_row + (heads_before + head) * 2 * HALF + pair[None, :]
        first = tl.load(in_heads, mask=inside, other=0.0).to(SUM)  # (ROWS, BLOCK)
        second = tl.load(in_heads + HALF, mask=inside, other=0.0).to(SUM)
        if ONE_BLOCK:
            if i > 0:
                is_column = is_pair & (head < head_count)
                b_first, b_second = _read_halves(
                    begins, rank, live, table_ptr, head * 2 * HALF, pair, is_column, R, COLUMN_STRIDE, HALF
                )
            first += tl.dot(h, b_first, input_precision="ieee", out_dtype=SUM)
            second += tl.dot(h, b_second, input_precision="ieee", out_dtype=SUM)
        else:
            is_column = is_pair & (head < head_count)
            for start in range(0, live, BLOCK_R):
                of_block = start + rank
                begins = begins_of_b(
                    b_ptr, table_ptr, adapter, table_row, slot_stride, rank_stride, of_block, of_block < live,
                    PAGE_RANKS,
                )  # fmt: skip
                b_first, b_second = _read_halves(
                    begins,
                    of_block,
                    live,
                    table_ptr,
                    head * 2 * HALF,
                    pair,
                    is_column,
                    R,
                    COLUMN_STRIDE,
                    HALF,
                )
                h = read_h(h_ptr, rows, is_row, of_block, live, h_row_stride)
                first = tl.dot(h, b_first, first, input_precision="ieee", out_dtype=SUM)
                second = tl.dot(h, b_second, second, input_precision="ieee", out_dtype=SUM)
        rotated_first = tl.where(part < 2, first * cos - second * sin, first)
        rotated_second = tl.where(part < 2, second * cos + first * sin, second)
        is_changed = inside & ((part < 2) | (live > 0))
        tl.store(in_heads, rotated_first, mask=is_changed)
        tl.store(in_heads + HALF, rotated_second, mask=is_changed)
        # In the cache as in the batch, keys come before values.
        cached = inside & (part > 0)
        in_cache = cache_ptr + slot[:, None] * cache_slot + (heads_before - NUM_HEADS + head) * 2 * HALF
        tl.store(in_cache + pair[None, :], rotated_first, mask=cached)
        tl.store(in_cache + HALF + pair[None, :], rotated_second, mask=cached)


def adapted_rotary(
    update: Update,
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    tiles: TileList,
    tuned: AdaptedRotaryTiles | None = None,
) -> None:
    """Add what each row's adapter adds, rotate queries and keys, all in place; write keys and values to the cache.

    Computed in float32, of float64 in float64, and rounded once.

    update  of three slices: q, k and v of Hq * D, Hkv * D and Hkv * D columns; or of one, of all these columns
    heads   (T, Hq + 2 Hkv, D), queries, keys, values, without adapters; row stride of any width, rows contiguous
    cos, sin, slot_mapping, kv_cache   as `rotary_and_cache` takes them
    tuned   sizes, None = by shape
    """
    tuned = tuned or adapted_rotary_tiles(len(heads), update.rank)
    total, size = heads.shape[1:]
    kv_heads = kv_cache.shape[2] // 2
    num_heads = total - 2 * kv_heads
    b, b_firsts, slot_strides, rank_strides = _of_three(update, (0, num_heads, num_heads + kv_heads), size)
    is_one = len(update.b) == 1
    overlap = can_overlap(heads.device)
    rows = min(tuned.rows, tiles.block_rows)
    programs = programs_of_rows(len(heads), tiles) * (tiles.block_rows // rows)
    blocks = triton.cdiv(num_heads, tuned.heads) + 2 * triton.cdiv(kv_heads, tuned.heads)
    _adapted_rotary_kernel[(programs, blocks)](
        update.h,
        b,
        heads,
        cos,
        sin,
        slot_mapping,
        kv_cache,
        tiles.rows,
        tiles.tiles,
        update.table,
        update.ranks,
        tiles.tiles.shape[1],
        tiles.count,
        len(heads),
        0 if update.ranks is None or is_one else update.ranks.stride(0),
        update.table_row,
        b_firsts,
        slot_strides,
        rank_strides,
        0 if is_one else update.h.stride(0) // update.rank,
        update.h.stride(1),
        update.h_slot_stride,
        heads.stride(0),
        cos.stride(0),
        sin.stride(0),
        kv_cache.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HALF=size // 2,
        R=update.rank,
        COLUMN_STRIDE=update.column_stride,
        OVERLAP=overlap,
        ONE_BLOCK=update.rank <= tuned.block_r,
        PAGE_RANKS=update.page_ranks,
        BLOCK_ROWS=tiles.block_rows,
        ROWS=rows,
        HEADS=tuned.heads,
        BLOCK_R=tuned.block_r,
        # No fewer columns in one product than a tensor core takes ranks.
        BLOCK=max(LEAST_BLOCK_RANKS, triton.next_power_of_2(size // 2)),
        BLOCK_TILES=triton.next_power_of_2(tiles.tiles.shape[1]),
        SUM=sum_dtype(heads.dtype),
        num_warps=tuned.num_warps,
        num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )


def _of_three(update: Update, heads_before: tuple[int, int, int], size: int) -> tuple[tuple, ...]:
    """b, b_firsts, slot_strides and rank_strides of q, k and v, which may share one B."""
    places = update.b, update.b_firsts, update.slot_strides, update.rank_strides
    if len(update.b) == 3:
        return places
    b, (first,), slot_strides, rank_strides = places
    firsts = tuple(first + heads * size * update.column_stride for heads in heads_before)
    return b * 3, firsts, slot_strides * 3, rank_strides * 3
