"""The norm of a residual and an output, what adapters add to that included, for many rows: tiles of them.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM runs the norm.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_expand_op import read_h
from minivllm.gpu.kernels.paged_pieces import sum_dtype
from minivllm.gpu.kernels.paged_tuning import LEAST_BLOCK_RANKS, tiled_norm_tiles
from minivllm.gpu.kernels.tile_rows import programs_of_rows, rows_of_tile
from minivllm.gpu.kernels.update import Update, begins_of_b, live_rank, read_ranks
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.tuning import can_overlap


# These numbers differ between steps, or engines: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["capacity", "tile_count", "tokens", "table_row"])
def _adapted_norm_tiles_kernel(
    x_ptr,  # (T, H)
    residual_ptr,  # (T, H)
    weight_ptr,  # (H,)
    out_ptr,  # (T, H)
    rows_ptr,  # (T,) rows by slot, base rows last
    tiles_ptr,  # (3, capacity) slot, first row, rows
    h_ptr,  # (T, R), or of each slot one: see the strides
    b_ptr,
    table_ptr,  # (S, G) pages, or None
    ranks_ptr,  # (S,) live ranks, or None: all R
    capacity,
    tile_count,
    tokens,
    b_first,  # where B begins
    table_row,
    x_row,
    residual_row,
    h_row,
    h_slot_stride,
    slot_stride,
    rank_stride,
    H: tl.constexpr,
    R: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # of a program
    BLOCK_R: tl.constexpr,  # no fewer than R
    BLOCK_N: tl.constexpr,
    BLOCK_TILES: tl.constexpr,  # no fewer than tiles
    STAGES: tl.constexpr,
    SUM: tl.constexpr,  # dtype of sums
):
    """One program: ROWS rows of one tile. It sums them block by block of columns, then norms what it has written.

    The grid counts tiles, and past these blocks of base rows. Nothing past a live rank is read.
    """
    share: tl.constexpr = BLOCK_ROWS // ROWS
    tile, done = tl.program_id(0) // share, tl.program_id(0) % share * ROWS
    slot, first, length = rows_of_tile(tiles_ptr, capacity, tile, tile_count, tokens, BLOCK_ROWS, BLOCK_TILES)
    if length <= done:
        if OVERLAP:  # or what comes after this kernel might not wait for what came before it
            tl.extra.cuda.gdc_wait()
        return
    live = 0
    if tile < tile_count:
        live = live_rank(ranks_ptr, slot, R)
    place = done + tl.arange(0, ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)  # (ROWS,)
    rank = tl.arange(0, BLOCK_R)
    begins = begins_of_b(
        b_ptr + b_first, table_ptr, slot, table_row, slot_stride, rank_stride, rank, rank < live, PAGE_RANKS
    )
    x_rows = (x_ptr + rows * x_row)[:, None]
    residual_rows = (residual_ptr + rows * residual_row)[:, None]
    out_rows = (out_ptr + rows * H)[:, None]
    if OVERLAP:  # the kernels ahead may still run until here
        tl.extra.cuda.gdc_wait()
    h = read_h(h_ptr + slot * h_slot_stride, rows, is_row, rank, live, h_row)
    squares = tl.zeros((ROWS,), SUM)
    for start in tl.range(0, H, BLOCK_N, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_N)
        is_column = columns < H
        inside = is_row[:, None] & is_column[None, :]
        places = begins[:, None] + (columns * COLUMN_STRIDE)[None, :]
        b = read_ranks(places, rank, live, R, table_ptr, is_column[None, :], 0)
        x = tl.load(x_rows + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        residual = tl.load(residual_rows + columns[None, :], mask=inside, other=0.0)
        total = tl.dot(h, b, input_precision="ieee", out_dtype=SUM) + x + residual
        # The norm sees the sum as the residual stream keeps it: rounded.
        kept = total.to(residual.dtype)
        tl.store(residual_rows + columns[None, :], kept, mask=inside)
        squares += tl.sum(kept.to(SUM) * kept.to(SUM), axis=1)
    scale = tl.rsqrt(squares / H + EPS)
    tl.debug_barrier()  # other threads may read what one has written
    for start in tl.range(0, H, BLOCK_N, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_N)
        is_column = columns < H
        inside = is_row[:, None] & is_column[None, :]
        kept = tl.load(residual_rows + columns[None, :], mask=inside, other=0.0)
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(SUM)
        tl.store(out_rows + columns[None, :], kept.to(SUM) * scale[:, None] * weight[None, :], mask=inside)


def adapted_norm_of_tiles(
    update: Update,
    tiles: TileList,
    weight: torch.Tensor,
    eps: float,
    x: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """As `adapted_norm`, for many rows of few ranks: all ranks are in one product.   -> (T, H)

    update  of one slice of H columns, of B's dtype
    tiles   of all T rows
    weight  (H,)
    x       (T, H) without adapters, row stride of any width. Not changed
    residual  (T, H), row stride of any width
    """
    tuned = tiled_norm_tiles(x.itemsize)
    out = x.new_empty(x.shape)
    overlap = can_overlap(x.device)
    programs = programs_of_rows(len(x), tiles) * (tiles.block_rows // tuned.rows)
    _adapted_norm_tiles_kernel[(programs,)](
        x,
        residual,
        weight,
        out,
        tiles.rows,
        tiles.tiles,
        update.h,
        update.b[0],
        update.table,
        update.ranks_of_first,
        tiles.tiles.shape[1],
        tiles.count,
        len(x),
        update.b_firsts[0],
        update.table_row,
        x.stride(0),
        residual.stride(0),
        update.h.stride(1),
        update.h_slot_stride,
        update.slot_strides[0],
        update.rank_strides[0],
        H=x.shape[1],
        R=update.rank,
        COLUMN_STRIDE=update.column_stride,
        EPS=eps,
        OVERLAP=overlap,
        PAGE_RANKS=update.page_ranks,
        BLOCK_ROWS=tiles.block_rows,
        ROWS=tuned.rows,
        BLOCK_R=max(LEAST_BLOCK_RANKS, triton.next_power_of_2(update.rank)),
        BLOCK_N=tuned.block_n,
        BLOCK_TILES=triton.next_power_of_2(tiles.tiles.shape[1]),
        STAGES=tuned.num_stages,
        SUM=sum_dtype(x.dtype),
        num_warps=tuned.num_warps,
        num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
