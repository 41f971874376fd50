"""Rotary embedding and the write to the KV cache, what adapters add to q, k and v included: these are read once.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM rotates and writes the cache.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import add_ranks, read_b, read_h, rows_of_ranks, sum_dtype
from minivllm.gpu.kernels.paged_tuning import LEAST_BLOCK_RANKS, AdaptedRotaryTiles, adapted_rotary_tiles
from minivllm.gpu.kernels.tile_rows import programs_of_rows, rows_of_tile
from minivllm.gpu.kernels.update import Update
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.tuning import can_overlap


@triton.jit
def _of_part(part, three):
    """One of q's, k's and v's."""
    return tl.where(part == 0, three[0], tl.where(part == 1, three[1], three[2]))


# These numbers differ between steps, or engines: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["capacity", "tile_count", "tokens", "ranks_row", "table_row"])
def _adapted_rotary_kernel(
    h_ptr,  # (3, T, R), or (1, T, R)
    pool_ptr,  # pages
    heads_ptr,  # (T, Hq + 2 Hkv, D)
    cos_ptr,  # (T, D)
    sin_ptr,
    slot_mapping_ptr,  # (T,) where in the cache each row goes
    cache_ptr,  # (slots, 2 Hkv, D)
    rows_ptr,  # (T,) rows by slot, base rows last
    tiles_ptr,  # (3, capacity) slot, first row, rows
    table_ptr,  # (S, G) pages
    ranks_ptr,  # (3, S) live ranks, or (1, S)
    capacity,
    tile_count,
    tokens,
    ranks_row,
    table_row,
    page_stride,
    b_places,  # where B of q, k and v begins in a page, or the one B of all
    heads_row,
    cos_row,
    sin_row,
    cache_slot,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # of D
    R: tl.constexpr,
    OVERLAP: tl.constexpr,
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
    slot, first_place, length = rows_of_tile(
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

    # A rank's row of B has heads one after the other: those of q, of k or of v, or in one B those of all three.
    if len(b_places) == 1:
        begin_ptr = pool_ptr + b_places[0]
        of_part, first_of_b, heads_of_b = 0, heads_before, NUM_HEADS + 2 * NUM_KV_HEADS
    else:
        begin_ptr = pool_ptr + _of_part(part, b_places)
        of_part, first_of_b, heads_of_b = part, 0, head_count
    live = tl.load(ranks_ptr + of_part * ranks_row + slot, mask=tile < tile_count, other=0)
    width = heads_of_b * 2 * HALF
    h_ptr += of_part * tokens * R
    table_ptr += slot * table_row
    rank, pair = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK)
    is_pair = pair < HALF
    if R <= BLOCK_R:  # straight on, so that all loads are under way together
        rows_of_b = rows_of_ranks(begin_ptr, table_ptr, page_stride, rank, rank < R, 0, width, PAGE_RANKS)
        columns = (first_of_b + first_head) * 2 * HALF + pair
        b_first = read_b(rows_of_b, columns, is_pair, rank, live)
        b_second = read_b(rows_of_b, columns + HALF, is_pair, rank, live)
    # Made at the beginning of a step, as tiles are. Values stay as they are.
    turned = is_row[:, None] & is_pair[None, :] & (part < 2)
    cos = tl.load(cos_ptr + rows[:, None] * cos_row + pair[None, :], mask=turned, other=1.0).to(SUM)
    # The sines' second half is the plain one; the first holds the minus of rotate-half.
    sin = tl.load(sin_ptr + rows[:, None] * sin_row + HALF + pair[None, :], mask=turned, other=0.0).to(SUM)
    in_cache = tl.load(slot_mapping_ptr + rows, mask=is_row & (part > 0), other=0).to(tl.int64)
    if OVERLAP:  # the kernels ahead may still run until here
        tl.extra.cuda.gdc_wait()
    if R <= BLOCK_R:
        h = read_h(h_ptr, rows, is_row, rank, live, R)

    for i in tl.static_range(HEADS):
        head = first_head + i
        is_column = is_pair & (head < head_count)
        inside = is_row[:, None] & is_column[None, :]
        in_heads = heads_ptr + rows[:, None] * heads_row + (heads_before + head) * 2 * HALF + pair[None, :]
        first = tl.load(in_heads, mask=inside, other=0.0).to(SUM)  # (ROWS, BLOCK)
        second = tl.load(in_heads + HALF, mask=inside, other=0.0).to(SUM)
        columns = (first_of_b + head) * 2 * HALF + pair
        if R <= BLOCK_R:
            if i > 0:
                b_first = read_b(rows_of_b, columns, is_column, rank, live)
                b_second = read_b(rows_of_b, columns + HALF, is_column, rank, live)
            first += tl.dot(h, b_first, input_precision="ieee", out_dtype=SUM)
            second += tl.dot(h, b_second, input_precision="ieee", out_dtype=SUM)
        else:
            first = add_ranks(
                first, 0, live, h_ptr, rows, is_row,
                begin_ptr, table_ptr, page_stride, 0, columns, is_column, width, R, PAGE_RANKS, BLOCK_R,
            )  # fmt: skip
            second = add_ranks(
                second, 0, live, h_ptr, rows, is_row,
                begin_ptr, table_ptr, page_stride, 0, columns + HALF, is_column, width, R, PAGE_RANKS, BLOCK_R,
            )  # fmt: skip
        rotated_first = tl.where(part < 2, first * cos - second * sin, first)
        rotated_second = tl.where(part < 2, second * cos + first * sin, second)
        is_changed = inside & ((part < 2) | (live > 0))
        tl.store(in_heads, rotated_first, mask=is_changed)
        tl.store(in_heads + HALF, rotated_second, mask=is_changed)
        # In the cache as in the batch, keys come before values.
        cached = inside & (part > 0)
        cache_ptrs = cache_ptr + in_cache[:, None] * cache_slot + (heads_before - NUM_HEADS + head) * 2 * HALF
        tl.store(cache_ptrs + pair[None, :], rotated_first, mask=cached)
        tl.store(cache_ptrs + HALF + pair[None, :], rotated_second, mask=cached)


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
    pieces = update.pieces
    tuned = tuned or adapted_rotary_tiles(len(heads), pieces.rank)
    total, size = heads.shape[1:]
    kv_heads = kv_cache.shape[2] // 2
    num_heads = total - 2 * kv_heads
    overlap = can_overlap(heads.device)
    rows = min(tuned.rows, tiles.block_rows)
    programs = programs_of_rows(len(heads), tiles) * (tiles.block_rows // rows)
    blocks = triton.cdiv(num_heads, tuned.heads) + 2 * triton.cdiv(kv_heads, tuned.heads)
    _adapted_rotary_kernel[(programs, blocks)](
        update.h,
        pieces.pool,
        heads,
        cos,
        sin,
        slot_mapping,
        kv_cache,
        tiles.rows,
        tiles.tiles,
        pieces.table,
        pieces.ranks,
        tiles.tiles.shape[1],
        tiles.count,
        len(heads),
        pieces.ranks.stride(0),
        pieces.table.stride(0),
        pieces.page_stride,
        pieces.b,
        heads.stride(0),
        cos.stride(0),
        sin.stride(0),
        kv_cache.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HALF=size // 2,
        R=pieces.rank,
        OVERLAP=overlap,
        PAGE_RANKS=pieces.page_ranks,
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
