"""silu(gate) * up, what adapters add to gate and up included: their output is read once and written nowhere.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM runs the activation.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import add_ranks, read_b, read_h, rows_of_ranks, sum_dtype
from minivllm.gpu.kernels.paged_tuning import PagedExpandTiles, adapted_silu_tiles
from minivllm.gpu.kernels.tile_rows import programs_of_rows, rows_of_tile
from minivllm.gpu.kernels.update import Update
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.tuning import can_overlap


# These numbers differ between steps, or engines: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["capacity", "tile_count", "tokens", "ranks_row", "table_row"])
def _adapted_silu_kernel(
    h_ptr,  # (2, T, R)
    pool_ptr,  # pages
    y_ptr,  # (T, >= 2 * WIDTH): gate, then up
    out_ptr,  # (T, WIDTH)
    rows_ptr,  # (T,) rows by slot, base rows last
    tiles_ptr,  # (3, capacity) slot, first row, rows
    table_ptr,  # (S, G) pages
    ranks_ptr,  # (2, S) live ranks
    capacity,
    tile_count,
    tokens,
    ranks_row,
    table_row,
    page_stride,
    b_places,  # 2: where B of gate and of up begins in a page
    y_row_stride,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    OVERLAP: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TILES: tl.constexpr,  # no fewer than tiles
    SUM: tl.constexpr,  # dtype of sums
):
    """One program: one tile of rows, one block of columns of gate and the same of up.

    Axis 0 of the grid counts tiles, and past these blocks of base rows. Sums are float32 and rounded once, after the
    activation. Nothing past a live rank is read.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    slot, first, length = rows_of_tile(tiles_ptr, capacity, tile, tile_count, tokens, BLOCK_ROWS, BLOCK_TILES)
    if length <= 0:
        if OVERLAP:  # or what comes after this kernel might not wait for what came before it
            tl.extra.cuda.gdc_wait()
        return
    has_slot = tile < tile_count
    live_gate = tl.load(ranks_ptr + slot, mask=has_slot, other=0)
    live_up = tl.load(ranks_ptr + ranks_row + slot, mask=has_slot, other=0)
    place = tl.arange(0, BLOCK_ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)  # (BLOCK_ROWS,)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < WIDTH
    inside = is_row[:, None] & is_column[None, :]
    y_block = y_ptr + rows[:, None] * y_row_stride + columns[None, :]
    gate_ptr, up_ptr = pool_ptr + b_places[0], pool_ptr + b_places[1]
    up_h_ptr = h_ptr + tokens * R
    table_ptr += slot * table_row
    rank = tl.arange(0, BLOCK_R)
    if R <= BLOCK_R:  # straight on, so that all loads are under way together
        is_rank = rank < R
        rows_of_gate = rows_of_ranks(gate_ptr, table_ptr, page_stride, rank, is_rank, 0, WIDTH, PAGE_RANKS)
        rows_of_up = rows_of_ranks(up_ptr, table_ptr, page_stride, rank, is_rank, 0, WIDTH, PAGE_RANKS)
        gate_b = read_b(rows_of_gate, columns, is_column, rank, live_gate)
        up_b = read_b(rows_of_up, columns, is_column, rank, live_up)
    if OVERLAP:  # the kernels ahead may still run until here
        tl.extra.cuda.gdc_wait()
    gate = tl.load(y_block, mask=inside, other=0.0).to(SUM)
    up = tl.load(y_block + WIDTH, mask=inside, other=0.0).to(SUM)
    if R <= BLOCK_R:
        h = read_h(h_ptr, rows, is_row, rank, live_gate, R)
        gate = tl.dot(h, gate_b, gate, input_precision="ieee", out_dtype=SUM)
        h = read_h(up_h_ptr, rows, is_row, rank, live_up, R)
        up = tl.dot(h, up_b, up, input_precision="ieee", out_dtype=SUM)
    else:
        gate = add_ranks(
            gate, 0, live_gate, h_ptr, rows, is_row,
            gate_ptr, table_ptr, page_stride, 0, columns, is_column, WIDTH, R, PAGE_RANKS, BLOCK_R,
        )  # fmt: skip
        up = add_ranks(
            up, 0, live_up, up_h_ptr, rows, is_row,
            up_ptr, table_ptr, page_stride, 0, columns, is_column, WIDTH, R, PAGE_RANKS, BLOCK_R,
        )  # fmt: skip
    tl.store(
        out_ptr + rows[:, None] * WIDTH + columns[None, :], gate / (1.0 + tl.exp(-gate)) * up, mask=inside
    )


def adapted_silu(
    update: Update, y: torch.Tensor, tiles: TileList, tuned: PagedExpandTiles | None = None
) -> torch.Tensor:
    """silu(gate + what its adapter adds) * (up + what its adapter adds), of every row.   -> (T, I)

    update  of two slices of I columns, of B's dtype: gate and up
    y       (T, >= 2 * I): gate, then up, without adapters. Not changed
    tuned   tile sizes, None = by shape
    """
    pieces = update.pieces
    tuned = tuned or adapted_silu_tiles(len(y), pieces.rank)
    width = pieces.heights[0]
    out = y.new_empty(len(y), width)
    overlap = can_overlap(y.device)
    _adapted_silu_kernel[(programs_of_rows(len(y), tiles), triton.cdiv(width, tuned.block_n))](
        update.h,
        pieces.pool,
        y,
        out,
        tiles.rows,
        tiles.tiles,
        pieces.table,
        pieces.ranks,
        tiles.tiles.shape[1],
        tiles.count,
        len(y),
        pieces.ranks.stride(0),
        pieces.table.stride(0),
        pieces.page_stride,
        pieces.b,
        y.stride(0),
        WIDTH=width,
        R=pieces.rank,
        OVERLAP=overlap,
        PAGE_RANKS=pieces.page_ranks,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_R=tuned.block_r,
        BLOCK_N=tuned.block_n,
        BLOCK_TILES=triton.next_power_of_2(tiles.tiles.shape[1]),
        SUM=sum_dtype(y.dtype),
        num_warps=tuned.num_warps,
        num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
