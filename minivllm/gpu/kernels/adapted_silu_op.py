"""silu(gate) * up, what adapters add to gate and up included: their output is read once and written nowhere.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM runs the activation.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_expand_op import read_h
from minivllm.gpu.kernels.paged_pieces import sum_dtype
from minivllm.gpu.kernels.paged_tuning import PagedExpandTiles, adapted_silu_tiles
from minivllm.gpu.kernels.tile_rows import programs_of_rows, rows_of_tile
from minivllm.gpu.kernels.update import Update, begins_of_b, live_rank, read_ranks
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.tuning import can_overlap


@triton.jit
def _read_b(
    b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride, rank, live, columns, is_column,
    R: tl.constexpr, COLUMN_STRIDE: tl.constexpr, PAGE_RANKS: tl.constexpr,
):  # fmt: skip
    """B of some ranks and columns of one slice, zeros past the live rank: (ranks, columns)"""
    begins = begins_of_b(
        b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride, rank, rank < R, PAGE_RANKS
    )
    places = begins[:, None] + (columns * COLUMN_STRIDE)[None, :]
    return read_ranks(places, rank, live, R, table_ptr, is_column[None, :], 0)


# These numbers differ between steps, or engines: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["slice_stride", "capacity", "tile_count", "tokens", "ranks_row", "table_row"])
def _adapted_silu_kernel(
    h_ptr,  # (2, T, R), or of each slot one: see the strides
    gate_ptr,  # in which B of gate lies
    up_ptr,
    y_ptr,  # (T, >= 2 * WIDTH): gate, then up
    out_ptr,  # (T, WIDTH)
    rows_ptr,  # (T,) rows by slot, base rows last
    tiles_ptr,  # (3, capacity) adapter, first row, rows
    table_ptr,  # (S, G) pages, or None
    ranks_ptr,  # (2, S) live ranks, or None: all R
    capacity,
    tile_count,
    tokens,
    ranks_row,
    table_row,
    gate_first,  # where B begins
    up_first,
    gate_slot_stride,
    up_slot_stride,
    rank_stride,
    slice_stride,
    h_row_stride,
    h_slot_stride,
    y_row_stride,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # of ranks
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
    adapter, first, length = rows_of_tile(
        tiles_ptr, capacity, tile, tile_count, tokens, BLOCK_ROWS, BLOCK_TILES
    )
    if length <= 0:
        if OVERLAP:  # or what comes after this kernel might not wait for what came before it
            tl.extra.cuda.gdc_wait()
        return
    live_gate, live_up = 0, 0
    if tile < tile_count:
        live_gate = live_rank(ranks_ptr, adapter, R)
        live_up = live_gate if ranks_ptr is None else live_rank(ranks_ptr + ranks_row, adapter, R)
    place = tl.arange(0, BLOCK_ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)  # (BLOCK_ROWS,)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < WIDTH
    inside = is_row[:, None] & is_column[None, :]
    y_block = y_ptr + rows[:, None] * y_row_stride + columns[None, :]
    gate_ptr += gate_first
    up_ptr += up_first
    h_ptr += adapter * h_slot_stride
    rank = tl.arange(0, BLOCK_R)
    if ONE_BLOCK:  # straight on, so that all loads are under way together
        gate_b = _read_b(
            gate_ptr, table_ptr, adapter, table_row, gate_slot_stride, rank_stride,
            rank, live_gate, columns, is_column, R, COLUMN_STRIDE, PAGE_RANKS,
        )  # fmt: skip
        up_b = _read_b(
            up_ptr, table_ptr, adapter, table_row, up_slot_stride, rank_stride,
            rank, live_up, columns, is_column, R, COLUMN_STRIDE, PAGE_RANKS,
        )  # fmt: skip
    if OVERLAP:  # the kernels ahead may still run until here
        tl.extra.cuda.gdc_wait()
    gate = tl.load(y_block, mask=inside, other=0.0).to(SUM)
    up = tl.load(y_block + WIDTH, mask=inside, other=0.0).to(SUM)
    if ONE_BLOCK:
        h = read_h(h_ptr, rows, is_row, rank, live_gate, h_row_stride)
        gate = tl.dot(h, gate_b, gate, input_precision="ieee", out_dtype=SUM)
        h = read_h(h_ptr + slice_stride, rows, is_row, rank, live_up, h_row_stride)
        up = tl.dot(h, up_b, up, input_precision="ieee", out_dtype=SUM)
    else:
        for start in range(0, tl.maximum(live_gate, live_up), BLOCK_R):
            b = _read_b(
                gate_ptr, table_ptr, adapter, table_row, gate_slot_stride, rank_stride,
                start + rank, live_gate, columns, is_column, R, COLUMN_STRIDE, PAGE_RANKS,
            )  # fmt: skip
            h = read_h(h_ptr, rows, is_row, start + rank, live_gate, h_row_stride)
            gate = tl.dot(h, b, gate, input_precision="ieee", out_dtype=SUM)
            b = _read_b(
                up_ptr, table_ptr, adapter, table_row, up_slot_stride, rank_stride,
                start + rank, live_up, columns, is_column, R, COLUMN_STRIDE, PAGE_RANKS,
            )  # fmt: skip
            h = read_h(h_ptr + slice_stride, rows, is_row, start + rank, live_up, h_row_stride)
            up = tl.dot(h, b, up, input_precision="ieee", out_dtype=SUM)
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
    tuned = tuned or adapted_silu_tiles(len(y), update.rank)
    width = update.heights[0]
    out = y.new_empty(len(y), width)
    overlap = can_overlap(y.device)
    _adapted_silu_kernel[(programs_of_rows(len(y), tiles), triton.cdiv(width, tuned.block_n))](
        update.h,
        *update.b,
        y,
        out,
        tiles.rows,
        tiles.tiles,
        update.table,
        update.ranks,
        tiles.tiles.shape[1],
        tiles.count,
        len(y),
        0 if update.ranks is None else update.ranks.stride(0),
        update.table_row,
        *update.b_firsts,
        *update.slot_strides,
        update.rank_strides[0],
        update.h.stride(0),
        update.h.stride(1),
        update.h_slot_stride,
        y.stride(0),
        WIDTH=width,
        R=update.rank,
        COLUMN_STRIDE=update.column_stride,
        OVERLAP=overlap,
        ONE_BLOCK=update.rank <= tuned.block_r,
        PAGE_RANKS=update.page_ranks,
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
