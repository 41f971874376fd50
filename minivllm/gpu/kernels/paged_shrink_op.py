"""h = x · Aᵀ, every row with its own adapter's A, from pages.

Beside vllm/lora/ops/triton_ops/lora_shrink_op.py (v0.22.1), which knows no pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import PagedPieces, rows_of_ranks, sum_dtype
from minivllm.gpu.kernels.paged_tuning import LEAST_BLOCK_RANKS, PagedShrinkTiles
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList


# These numbers differ between steps, or engines: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["split_stride", "slice_stride", "capacity", "ranks_row", "table_row"])
def _paged_shrink_kernel(
    x_ptr,  # (T, K)
    pool_ptr,  # pages
    h_ptr,  # (n, T, R)
    planes_ptr,  # (SPLITS, n, T, R) of the sums' dtype
    counts_ptr,  # (tiles * blocks of ranks,) zeros
    rows_ptr,  # (T,) rows by slot
    tiles_ptr,  # (3, capacity) adapter, first row, rows
    table_ptr,  # (S, G) pages
    ranks_ptr,  # (n, S) live ranks
    K,
    R,
    capacity,
    ranks_row,
    table_row,
    page_stride,
    a_first,  # where A of slice 0 begins in a page
    a_step,  # from one slice's A to the next
    x_row_stride,
    split_stride,
    slice_stride,
    EXPERTS: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SUM: tl.constexpr,  # dtype of sums
):
    """One program: one tile of rows, every SPLITS-th block of K, BLOCK_R ranks of one slice.

    Axis 0 of the grid counts tiles (adapter -1 is none), axis 1 splits, axis 2 blocks of ranks, slice by slice. A row
    of A is found through the slot's page. Ranks that are not live cost nothing but a place in the product. h past the
    live rank is not written.

    Each split leaves a plane of partial sums. The last of them to end adds all planes up, always in the same order:
    what comes next then reads h once, and gets the same bits in every run. It leaves zero in its place of `counts`.
    """
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # What is looked up is asked for in two steps: all that the tile tells, then all that its adapter and place do.
    adapter = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + capacity + tile)
    length = tl.load(tiles_ptr + 2 * capacity + tile)
    if adapter < 0:
        return
    slot, expert = adapter // EXPERTS, adapter % EXPERTS
    blocks_a_slice = (R + BLOCK_R - 1) // BLOCK_R
    i = block // blocks_a_slice
    rank = block % blocks_a_slice * BLOCK_R + tl.arange(0, BLOCK_R)
    place = tl.arange(0, BLOCK_ROWS)
    is_row = place < length
    live = tl.load(ranks_ptr + i * ranks_row + slot)
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)  # (BLOCK_ROWS,)
    begin_ptr = pool_ptr + a_first + i * a_step
    rows_of_a = rows_of_ranks(
        begin_ptr, table_ptr + slot * table_row, page_stride, rank, rank < R, expert, K, PAGE_RANKS
    )
    if block % blocks_a_slice * BLOCK_R >= live:
        return
    is_live = rank < live
    columns = tl.arange(0, BLOCK_K)
    x_block = x_ptr + rows[:, None] * x_row_stride + columns[None, :]  # (BLOCK_ROWS, BLOCK_K)
    a_block = rows_of_a[None, :] + columns[:, None]  # (BLOCK_K, BLOCK_R)
    h = tl.zeros((BLOCK_ROWS, BLOCK_R), dtype=SUM)
    for k in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
        is_column = columns < K - k
        x = tl.load(x_block + k, mask=is_row[:, None] & is_column[None, :], other=0.0)
        a = tl.load(a_block + k, mask=is_live[None, :] & is_column[:, None], other=0.0)
        h = tl.dot(x, a.to(x.dtype), h, input_precision="ieee", out_dtype=SUM)
    out = i * slice_stride + rows[:, None] * R + rank[None, :]
    is_h = is_row[:, None] & is_live[None, :]
    if SPLITS == 1:
        tl.store(h_ptr + out, h, mask=is_h)
    else:
        tl.store(planes_ptr + split * split_stride + out, h, mask=is_h)
        tl.debug_barrier()  # the whole plane before its count
        count = counts_ptr + tile * tl.num_programs(2) + block
        if tl.atomic_add(count, 1, sem="acq_rel") == SPLITS - 1:
            h = tl.zeros((BLOCK_ROWS, BLOCK_R), dtype=SUM)
            for other in tl.static_range(SPLITS):
                # From where all processors see it: this one's own cache may be older.
                h += tl.load(
                    planes_ptr + other * split_stride + out, mask=is_h, other=0.0, cache_modifier=".cg"
                )
            tl.store(h_ptr + out, h, mask=is_h)
            tl.store(count, 0)


class ShrinkRoom(NamedTuple):
    """Where a shrink writes.

    h       (n, T, R) of the pages' dtype: the result
    planes  (splits, n, T, R) float32, of float64 float64: partial sums
    counts  (at least `counts_wanted`,) int32: zeros before, and after. Two shrinks at a time must not share them
    """

    h: torch.Tensor
    planes: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def make(
        cls, x: torch.Tensor, pieces: PagedPieces, counts: torch.Tensor, tuned: PagedShrinkTiles
    ) -> ShrinkRoom:
        size = len(pieces.a), len(x), pieces.rank
        of_sums = torch.float64 if x.dtype == torch.float64 else torch.float32
        planes = x.new_empty(tuned.splits, *size, dtype=of_sums)
        return cls(x.new_empty(size, dtype=pieces.pool.dtype), planes, counts)


def counts_wanted(tiles: int, slices: int, rank: int) -> int:
    """The most counts that a shrink needs, whatever its tile sizes.   rank: R"""
    return tiles * slices * triton.cdiv(rank, LEAST_BLOCK_RANKS)


def paged_shrink(
    x: torch.Tensor,
    pieces: PagedPieces,
    tiles: TileList,
    room: ShrinkRoom,
    tuned: PagedShrinkTiles,
) -> torch.Tensor:
    """h = x · Aᵀ, for `paged_expand`. One launch for all slices.

    x       (T, K), rows may be further apart than K; all slices have this K
    room    where to write, made for these tile sizes

    Returns h (n, T, R), summed in float32 and rounded once. Base rows, and what is past a row's live rank, are not
    written.
    """
    n, width = len(pieces.a), pieces.widths[0]
    _paged_shrink_kernel[(tiles.count, tuned.splits, n * triton.cdiv(pieces.rank, tuned.block_r))](
        x,
        pieces.pool,
        *room,
        tiles.rows,
        tiles.tiles,
        pieces.table,
        pieces.ranks,
        width,
        pieces.rank,
        tiles.tiles.shape[1],
        pieces.ranks.stride(0),
        pieces.table.stride(0),
        pieces.page_stride,
        pieces.a[0],
        pieces.a[1] - pieces.a[0] if n > 1 else 0,
        x.stride(0),
        room.planes.stride(0),
        room.h.stride(0),
        EXPERTS=pieces.experts,
        PAGE_RANKS=pieces.page_ranks,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_R=tuned.block_r,
        BLOCK_K=tuned.block_k,
        SPLITS=tuned.splits,
        SUM=sum_dtype(x.dtype),
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
    )
    return room.h
