"""The norm of a residual and an output, what adapters add to that included, for many rows: tiles of them.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM runs the norm.
"""

import torch
import triton
import triton.language as tl

from minivllm.lora.gpu.ops.paged_expand_op import read_h
from minivllm.lora.gpu.ops.paged_pieces import sum_dtype
from minivllm.lora.gpu.ops.paged_tuning import NormTiles, adapted_norm_of_tiles_tiles
from minivllm.lora.gpu.ops.update import Update, begins_of_b, live_rank, read_ranks
from minivllm.lora.ops.triton_ops.lora_kernel_metadata import TileList
from minivllm.lora.ops.triton_ops.tuning import can_overlap


@triton.jit
def _rounded_sum(x, residual, h, b, h_ptr, h_row, b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride,
    rows, is_row, columns, is_column, live,
    R: tl.constexpr, COLUMN_STRIDE: tl.constexpr, PAGE_RANKS: tl.constexpr,
    ONE_BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """residual + x + h · B of some columns, in the residual's dtype. h, b: the first BLOCK_R ranks of both"""
    total = tl.dot(h, b, input_precision="ieee", out_dtype=SUM)
    if not ONE_BLOCK:
        for start in range(BLOCK_R, live, BLOCK_R):
            rank = start + tl.arange(0, BLOCK_R)
            begins = begins_of_b(
                b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride, rank, rank < live, PAGE_RANKS
            )
            places = begins[:, None] + (columns * COLUMN_STRIDE)[None, :]
            b = read_ranks(places, rank, live, R, table_ptr, is_column[None, :], 0)
            h = read_h(h_ptr, rows, is_row, rank, live, h_row)
            total = tl.dot(h, b, total, input_precision="ieee", out_dtype=SUM)
    return (total + x + residual).to(residual.dtype)


@triton.jit
def _anew(values, zero):
    """The same values. The compiler knows that not, or it would keep their float32, in twice as many registers."""
    WIDTH: tl.constexpr = values.dtype.primitive_bitwidth
    BITS: tl.constexpr = tl.int16 if WIDTH == 16 else tl.int32 if WIDTH == 32 else tl.int64
    return (values.to(BITS, bitcast=True) ^ zero.to(BITS)).to(values.dtype, bitcast=True)


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
    ONE_BLOCK: tl.constexpr,  # of ranks
    PAGE_RANKS: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # of a part
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TILES: tl.constexpr,  # no fewer than tiles
    KEEP: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    SUM: tl.constexpr,  # dtype of sums
):
    """One program: ROWS rows of a tile, block by block of columns, then once more.

    The grid counts parts of tiles, and past these as many blocks of base rows as there can be: base rows lie behind
    all others. Nothing past a live rank is read.
    """
    part = tl.program_id(0)
    tile = part // PARTS
    slot = tl.load(tiles_ptr + tile, mask=tile < tile_count, other=0).to(tl.int64)
    live, first, length = 0, 0, 0
    if tile < tile_count:
        done = part % PARTS * ROWS
        if slot >= 0:
            first = tl.load(tiles_ptr + capacity + tile) + done
            length = tl.load(tiles_ptr + 2 * capacity + tile) - done
            live = live_rank(ranks_ptr, slot, R)
    else:
        each = tl.arange(0, BLOCK_TILES)
        is_tile = (each < tile_count) & (tl.load(tiles_ptr + each, mask=each < tile_count, other=-1) >= 0)
        lengths = tl.load(tiles_ptr + 2 * capacity + each, mask=is_tile, other=0)
        first = tl.sum(lengths) + (part - tile_count * PARTS) * ROWS
        length = tokens - first
    if length <= 0:
        if OVERLAP:  # or what comes after this kernel might not wait for what came before it
            tl.extra.cuda.gdc_wait()
        return
    place = tl.arange(0, ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)  # (ROWS,)
    rank = tl.arange(0, BLOCK_R)
    b_ptr += b_first
    h_ptr += slot * h_slot_stride
    begins = begins_of_b(
        b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride, rank, rank < live, PAGE_RANKS
    )
    x_rows, residual_rows, out_rows = (
        x_ptr + rows * x_row,
        residual_ptr + rows * residual_row,
        out_ptr + rows * H,
    )
    if OVERLAP:  # the kernels ahead may still run until here
        tl.extra.cuda.gdc_wait()
    h = read_h(h_ptr, rows, is_row, rank, live, h_row)
    squares = tl.zeros((ROWS,), SUM)
    column = tl.arange(0, BLOCK_N)
    if KEEP:
        # A block's loads are under way while the blocks before it are added up.
        xs, residuals, bs, sums = (), (), (), ()
        BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
        for i in tl.static_range(BLOCKS + AHEAD):
            if i < BLOCKS:
                columns = i * BLOCK_N + column
                is_column = columns < H
                inside = is_row[:, None] & is_column[None, :]
                xs += (
                    tl.load(
                        x_rows[:, None] + columns[None, :],
                        mask=inside,
                        other=0.0,
                        eviction_policy="evict_first",
                    ),
                )
                residuals += (tl.load(residual_rows[:, None] + columns[None, :], mask=inside, other=0.0),)
                places = begins[:, None] + (columns * COLUMN_STRIDE)[None, :]
                bs += (read_ranks(places, rank, live, R, table_ptr, is_column[None, :], 0),)
            if i >= AHEAD:
                columns = (i - AHEAD) * BLOCK_N + column
                is_column = columns < H
                inside = is_row[:, None] & is_column[None, :]
                kept = _rounded_sum(
                    xs[i - AHEAD], residuals[i - AHEAD], h, bs[i - AHEAD], h_ptr, h_row, b_ptr, table_ptr, slot,
                    table_row, slot_stride, rank_stride, rows, is_row, columns, is_column, live,
                    R, COLUMN_STRIDE, PAGE_RANKS, ONE_BLOCK, BLOCK_R, SUM,
                )  # fmt: skip
                tl.store(residual_rows[:, None] + columns[None, :], kept, mask=inside)
                squares += tl.sum(kept.to(SUM) * kept.to(SUM), axis=1)
                sums += (kept,)
        scale = tl.rsqrt(squares / H + EPS)
        for i in tl.static_range(BLOCKS):
            columns = i * BLOCK_N + column
            is_column = columns < H
            weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(SUM)
            normed = _anew(sums[i], length >> 30).to(SUM) * scale[:, None] * weight[None, :]
            tl.store(out_rows[:, None] + columns[None, :], normed, mask=is_row[:, None] & is_column[None, :])
    else:
        for start in tl.range(0, H, BLOCK_N, num_stages=STAGES):
            columns = start + column
            is_column = columns < H
            inside = is_row[:, None] & is_column[None, :]
            places = begins[:, None] + (columns * COLUMN_STRIDE)[None, :]
            b = read_ranks(places, rank, live, R, table_ptr, is_column[None, :], 0)
            x = tl.load(
                x_rows[:, None] + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
            )
            residual = tl.load(residual_rows[:, None] + columns[None, :], mask=inside, other=0.0)
            kept = _rounded_sum(
                x, residual, h, b, h_ptr, h_row, b_ptr, table_ptr, slot,
                table_row, slot_stride, rank_stride, rows, is_row, columns, is_column, live,
                R, COLUMN_STRIDE, PAGE_RANKS, ONE_BLOCK, BLOCK_R, SUM,
            )  # fmt: skip
            tl.store(residual_rows[:, None] + columns[None, :], kept, mask=inside)
            squares += tl.sum(kept.to(SUM) * kept.to(SUM), axis=1)
        scale = tl.rsqrt(squares / H + EPS)
        tl.debug_barrier()  # other threads may read what one has written
        for start in tl.range(0, H, BLOCK_N, num_stages=STAGES):
            columns = start + column
            is_column = columns < H
            inside = is_row[:, None] & is_column[None, :]
            kept = tl.load(residual_rows[:, None] + columns[None, :], mask=inside, other=0.0)
            weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(SUM)
            normed = kept.to(SUM) * scale[:, None] * weight[None, :]
            tl.store(out_rows[:, None] + columns[None, :], normed, mask=inside)


def adapted_norm_of_tiles(
    update: Update,
    tiles: TileList,
    weight: torch.Tensor,
    eps: float,
    x: torch.Tensor,
    residual: torch.Tensor,
    tuned: NormTiles | None = None,
) -> torch.Tensor:
    """residual += x and what its adapter adds, in place, rounded once; returns the norm of that.   -> (T, H)

    update  of one slice of H columns, of B's dtype
    tiles   of all T rows
    weight  (H,)
    x       (T, H) without adapters, row stride of any width. Not changed
    residual  (T, H), row stride of any width
    tuned   tile sizes, None = by shape
    """
    tuned = tuned or adapted_norm_of_tiles_tiles(len(x), x.shape[1], update.rank)
    out = x.new_empty(x.shape)
    overlap = can_overlap(x.device)
    height = min(tuned.rows, tiles.block_rows)
    parts = tiles.block_rows // height
    _adapted_norm_tiles_kernel[(tiles.count * parts + triton.cdiv(len(x), height),)](
        x,
        residual,
        weight,
        out,
        tiles.rows,
        tiles.tiles,
        update.h,
        update.b[0],
        update.table,
        None if update.ranks is None else update.ranks[0],
        tiles.tiles.shape[1],
        tiles.count,
        len(x),
        update.b_firsts[0],
        0 if update.table is None else update.table.stride(0),
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
        ONE_BLOCK=update.rank <= tuned.block_r,
        PAGE_RANKS=update.page_ranks,
        PARTS=parts,
        ROWS=height,
        BLOCK_R=tuned.block_r,
        BLOCK_N=tuned.block_n,
        BLOCK_TILES=triton.next_power_of_2(tiles.tiles.shape[1]),
        KEEP=tuned.keep,
        AHEAD=tuned.ahead,
        STAGES=tuned.stages,
        SUM=sum_dtype(x.dtype),
        num_warps=tuned.num_warps,
        num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
