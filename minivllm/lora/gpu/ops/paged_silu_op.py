"""silu(gate) * up, what adapters add to gate and up included: their output is read once and written nowhere.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM runs the activation.
"""

import torch
import triton
import triton.language as tl

from minivllm.lora.gpu.ops.paged_expand_op import read_b, read_h
from minivllm.lora.gpu.ops.paged_pieces import PagedPieces, sum_dtype
from minivllm.lora.gpu.ops.paged_tuning import PagedExpandTiles, paged_silu_tiles
from minivllm.lora.ops.triton_ops.lora_kernel_metadata import TileList
from minivllm.lora.ops.triton_ops.tuning import can_overlap


# These numbers differ between steps, or engines: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["slice_stride", "capacity", "tile_count", "tokens", "ranks_row", "table_row"])
def _paged_silu_kernel(
    h_ptr,  # (2, T, R)
    pool_ptr,  # pages
    y_ptr,  # (T, >= 2 * WIDTH): gate, then up
    out_ptr,  # (T, WIDTH)
    rows_ptr,  # (T,) rows by slot, base rows last
    tiles_ptr,  # (3, capacity) adapter, first row, rows
    table_ptr,  # (S, G) pages
    ranks_ptr,  # (2, S) live ranks
    R,
    capacity,
    tile_count,
    tokens,
    ranks_row,
    table_row,
    page_stride,
    b_gate,  # where B begins in a page
    b_up,
    slice_stride,
    y_row_stride,
    WIDTH: tl.constexpr,
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

    Axis 0 of the grid counts tiles, and past these as many blocks of base rows as there can be: base rows lie behind
    all others. Sums are float32 and rounded once, after the activation. Nothing past a live rank is read.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(tiles_ptr + tile, mask=tile < tile_count, other=0).to(tl.int64)
    if adapter < 0:
        if OVERLAP:  # or what comes after this kernel might not wait for what came before it
            tl.extra.cuda.gdc_wait()
        return
    live_gate, live_up = 0, 0
    if tile < tile_count:
        first = tl.load(tiles_ptr + capacity + tile)
        length = tl.load(tiles_ptr + 2 * capacity + tile)
        live_gate = tl.load(ranks_ptr + adapter)
        live_up = tl.load(ranks_ptr + ranks_row + adapter)
    else:
        each = tl.arange(0, BLOCK_TILES)
        is_tile = (each < tile_count) & (tl.load(tiles_ptr + each, mask=each < tile_count, other=-1) >= 0)
        lengths = tl.load(tiles_ptr + 2 * capacity + each, mask=is_tile, other=0)
        first = tl.sum(lengths) + (tile - tile_count) * BLOCK_ROWS
        length = tokens - first
    if length <= 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        return
    place = tl.arange(0, BLOCK_ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)  # (BLOCK_ROWS,)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = is_row[:, None] & (columns < WIDTH)[None, :]
    y_block = y_ptr + rows[:, None] * y_row_stride + columns[None, :]
    table_ptr += adapter * table_row
    gate_b, up_b = pool_ptr + b_gate, pool_ptr + b_up
    ranks = tl.arange(0, BLOCK_R)
    if ONE_BLOCK:  # straight on, so that all loads are under way together
        own_gate = read_b(gate_b, table_ptr, page_stride, ranks, live_gate, 0, columns, WIDTH, PAGE_RANKS)
        own_up = read_b(up_b, table_ptr, page_stride, ranks, live_up, 0, columns, WIDTH, PAGE_RANKS)
    if OVERLAP:  # the kernels ahead may still run until here
        tl.extra.cuda.gdc_wait()
    gate = tl.load(y_block, mask=inside, other=0.0).to(SUM)
    up = tl.load(y_block + WIDTH, mask=inside, other=0.0).to(SUM)
    if ONE_BLOCK:
        h = read_h(h_ptr, rows, is_row, ranks, live_gate, R)
        gate = tl.dot(h, own_gate, gate, input_precision="ieee", out_dtype=SUM)
        h = read_h(h_ptr + slice_stride, rows, is_row, ranks, live_up, R)
        up = tl.dot(h, own_up, up, input_precision="ieee", out_dtype=SUM)
    else:
        for start in range(0, tl.maximum(live_gate, live_up), BLOCK_R):
            rank = start + ranks
            b = read_b(gate_b, table_ptr, page_stride, rank, live_gate, 0, columns, WIDTH, PAGE_RANKS)
            h = read_h(h_ptr, rows, is_row, rank, live_gate, R)
            gate = tl.dot(h, b, gate, input_precision="ieee", out_dtype=SUM)
            b = read_b(up_b, table_ptr, page_stride, rank, live_up, 0, columns, WIDTH, PAGE_RANKS)
            h = read_h(h_ptr + slice_stride, rows, is_row, rank, live_up, R)
            up = tl.dot(h, b, up, input_precision="ieee", out_dtype=SUM)
    tl.store(
        out_ptr + rows[:, None] * WIDTH + columns[None, :], gate / (1.0 + tl.exp(-gate)) * up, mask=inside
    )


def paged_silu(
    h: torch.Tensor,
    pieces: PagedPieces,
    y: torch.Tensor,
    tiles: TileList,
    tuned: PagedExpandTiles | None = None,
) -> torch.Tensor:
    """silu(gate + what its adapter adds) * (up + what its adapter adds), of every row.   -> (T, I)

    h       (2, T, R) of the pages' dtype, as `paged_shrink` gives it
    pieces  two slices of I rows: gate and up; no experts
    y       (T, >= 2 * I): gate, then up, without adapters. Not changed
    tuned   tile sizes, None = by shape
    """
    tuned = tuned or paged_silu_tiles(len(y), pieces.rank)
    width = pieces.heights[0]
    out = y.new_empty(len(y), width)
    overlap = can_overlap(y.device)
    base_tiles = triton.cdiv(len(y), tiles.block_rows)
    _paged_silu_kernel[(tiles.count + base_tiles, triton.cdiv(width, tuned.block_n))](
        h,
        pieces.pool,
        y,
        out,
        tiles.rows,
        tiles.tiles,
        pieces.table,
        pieces.ranks,
        pieces.rank,
        tiles.tiles.shape[1],
        tiles.count,
        len(y),
        pieces.ranks.stride(0),
        pieces.table.stride(0),
        pieces.page_stride,
        *pieces.b,
        h.stride(0),
        y.stride(0),
        WIDTH=width,
        OVERLAP=overlap,
        ONE_BLOCK=pieces.rank <= tuned.block_r,
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
