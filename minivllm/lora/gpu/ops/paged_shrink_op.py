"""h = x · Aᵀ, every row with its own adapter's A, from pages.

Beside vllm/lora/ops/triton_ops/lora_shrink_op.py (v0.22.1), which knows no pages.
"""

import torch
import triton
import triton.language as tl

from minivllm.lora.gpu.ops.paged_pieces import PagedPieces
from minivllm.lora.gpu.ops.paged_tuning import PagedShrinkTiles, paged_shrink_tiles
from minivllm.lora.ops.triton_ops.lora_kernel_metadata import TileList


# These strides differ from step to step: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["h_split_stride", "h_slice_stride", "capacity"])
def _paged_shrink_kernel(
    x_ptr,  # (T, K)
    pool_ptr,  # pages
    h_ptr,  # (splits, n, T, R) float32
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
    h_split_stride,
    h_slice_stride,
    N: tl.constexpr,
    SLICES: tl.constexpr,  # of one program: a power of two
    EXPERTS: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program: one tile of rows, every SPLITS-th block of K, BLOCK_R ranks of SLICES slices.

    Axis 0 of the grid counts tiles (adapter -1 is none), axis 1 splits, axis 2 blocks of ranks, slice by slice. A row
    of A is found through the slot's page. Ranks that are not live cost nothing but a place in the product. h past the
    live rank is not written.
    """
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(tiles_ptr + tile).to(tl.int64)
    if adapter < 0:
        return
    slot, expert = adapter // EXPERTS, adapter % EXPERTS
    blocks_a_slice = (R + BLOCK_R - 1) // BLOCK_R
    column = tl.arange(0, SLICES * BLOCK_R)
    i = block // blocks_a_slice * SLICES + column // BLOCK_R  # slice of each column
    rank = block % blocks_a_slice * BLOCK_R + column % BLOCK_R
    live = tl.load(ranks_ptr + i * ranks_row + slot, mask=i < N, other=0)
    is_live = rank < live
    if tl.max(is_live.to(tl.int32)) == 0:
        return
    first = tl.load(tiles_ptr + capacity + tile)
    length = tl.load(tiles_ptr + 2 * capacity + tile)
    place = tl.arange(0, BLOCK_ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)  # (BLOCK_ROWS,)

    page = tl.load(table_ptr + slot * table_row + rank // PAGE_RANKS, mask=rank < R, other=0).to(tl.int64)
    a_row = page * page_stride + a_first + i * a_step + (expert * PAGE_RANKS + rank % PAGE_RANKS) * K
    columns = tl.arange(0, BLOCK_K)
    x_block = x_ptr + rows[:, None] * x_row_stride + columns[None, :]  # (BLOCK_ROWS, BLOCK_K)
    a_block = pool_ptr + a_row[None, :] + columns[:, None]  # (BLOCK_K, SLICES * BLOCK_R)
    h = tl.zeros((BLOCK_ROWS, SLICES * BLOCK_R), dtype=tl.float32)
    for k in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
        is_column = columns < K - k
        x = tl.load(x_block + k, mask=is_row[:, None] & is_column[None, :], other=0.0)
        a = tl.load(a_block + k, mask=is_live[None, :] & is_column[:, None], other=0.0)
        h = tl.dot(x, a.to(x.dtype), h, input_precision="ieee")
    out = h_ptr + split * h_split_stride + i[None, :] * h_slice_stride + rows[:, None] * R + rank[None, :]
    tl.store(out, h, mask=is_row[:, None] & is_live[None, :])


def empty_planes(x: torch.Tensor, pieces: PagedPieces, tuned: PagedShrinkTiles) -> torch.Tensor:
    """Room for the planes of a shrink: (splits, n, T, R) float32"""
    size = tuned.splits, len(pieces.a), len(x), pieces.rank
    return torch.empty(size, dtype=torch.float32, device=x.device)


def paged_shrink(
    x: torch.Tensor,
    pieces: PagedPieces,
    tiles: TileList,
    h: torch.Tensor | None = None,
    tuned: PagedShrinkTiles | None = None,
) -> torch.Tensor:
    """Partial sums of h = x · Aᵀ, to be added up by `paged_expand`. One launch for all slices.

    x       (T, K), rows may be further apart than K; all slices have this K
    h       where to write, None = new memory
    tuned   tile sizes, None = by shape

    Returns h (splits, n, T, R) float32. Base rows, and what is past a row's live rank, are not written.
    """
    n, width = len(pieces.a), pieces.widths[0]
    tuned = tuned or paged_shrink_tiles(len(x), width, pieces.rank, n)
    h = empty_planes(x, pieces, tuned) if h is None else h
    blocks = triton.cdiv(n, tuned.slices) * triton.cdiv(pieces.rank, tuned.block_r)
    _paged_shrink_kernel[(tiles.count, len(h), blocks)](
        x,
        pieces.pool,
        h,
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
        h.stride(0),
        h.stride(1),
        N=n,
        SLICES=tuned.slices,
        EXPERTS=pieces.experts,
        PAGE_RANKS=pieces.page_ranks,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_R=tuned.block_r,
        BLOCK_K=tuned.block_k,
        SPLITS=len(h),
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
    )
    return h
