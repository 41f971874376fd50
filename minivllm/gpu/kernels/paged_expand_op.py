"""y += h · Bᵀ, every row with its own adapter's B, from pages.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), which knows no pages.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import (
    PagedPieces,
    add_ranks,
    read_b,
    read_h,
    rows_of_ranks,
    sum_dtype,
)
from minivllm.gpu.kernels.paged_tuning import PagedExpandTiles, paged_expand_tiles
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.tuning import can_overlap


# These numbers differ between steps, or engines: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["slice_stride", "capacity", "ranks_row", "table_row"])
def _paged_expand_kernel(
    h_ptr,  # (n, T, R)
    pool_ptr,  # pages
    y_ptr,  # (T, >= N)
    rows_ptr,  # (T,) rows by slot
    tiles_ptr,  # (3, capacity) adapter, first row, rows
    table_ptr,  # (S, G) pages
    ranks_ptr,  # (n, S) live ranks
    R,
    capacity,
    ranks_row,
    table_row,
    page_stride,
    b_places,  # n: where B of each slice begins in a page
    slice_stride,
    y_row_stride,
    WIDTHS: tl.constexpr,
    OVERLAP: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # of ranks
    EXPERTS: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUM: tl.constexpr,  # dtype of sums
):
    """One program: one tile of rows, one block of columns of one slice, all live ranks, BLOCK_R at a time.

    Axes as in `_lora_expand_kernel`. A rank's share of B is a row of N_i elements in its page.
    Nothing past the live rank is read, of h nor of B. With OVERLAP the kernels ahead may still run, until gdc_wait.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + capacity + tile)
    length = tl.load(tiles_ptr + 2 * capacity + tile)
    if adapter < 0:
        if OVERLAP:  # or what comes after this kernel might not wait for what came before it
            tl.extra.cuda.gdc_wait()
        return
    slot, expert = adapter // EXPERTS, adapter % EXPERTS
    place = tl.arange(0, BLOCK_ROWS)
    is_row = place < length
    rows = tl.load(rows_ptr + first + place, mask=is_row, other=0).to(tl.int64)  # (BLOCK_ROWS,)
    ranks = tl.arange(0, BLOCK_R)
    table_ptr += slot * table_row

    offset = 0
    for i in tl.static_range(len(b_places)):
        blocks = (WIDTHS[i] + BLOCK_N - 1) // BLOCK_N
        if (block >= 0) & (block < blocks):
            live = tl.load(ranks_ptr + i * ranks_row + slot)
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = columns < WIDTHS[i]
            begin_ptr = pool_ptr + b_places[i]
            h_block = h_ptr + i * slice_stride
            y_block = y_ptr + rows[:, None] * y_row_stride + offset + columns[None, :]
            is_y = is_row[:, None] & is_column[None, :] & (live > 0)
            if ONE_BLOCK:
                # Straight on, so that all loads are under way together.
                rows_of_b = rows_of_ranks(
                    begin_ptr, table_ptr, page_stride, ranks, ranks < R, expert, WIDTHS[i], PAGE_RANKS
                )
                b = read_b(rows_of_b, columns, is_column, ranks, live)
                # Up to here nothing depends on the product before; from here on, its h and its y must be there.
                if OVERLAP:
                    tl.extra.cuda.gdc_wait()
                y = tl.load(y_block, mask=is_y, other=0.0)
                h = read_h(h_block, rows, is_row, ranks, live, R)
                update = tl.dot(h, b, input_precision="ieee", out_dtype=SUM) + y
            else:
                if OVERLAP:
                    tl.extra.cuda.gdc_wait()
                update = add_ranks(
                    tl.load(y_block, mask=is_y, other=0.0).to(SUM), 0, live, h_block, rows, is_row,
                    begin_ptr, table_ptr, page_stride, expert, columns, is_column, WIDTHS[i], R, PAGE_RANKS, BLOCK_R,
                )  # fmt: skip
            tl.store(y_block, update, mask=is_y)
        block -= blocks
        offset += WIDTHS[i]


def paged_expand(
    h: torch.Tensor,
    pieces: PagedPieces,
    y: torch.Tensor,
    tiles: TileList,
    tuned: PagedExpandTiles | None = None,
) -> None:
    """y[:, slice i] += h[i] · B_iᵀ, in place. One launch for all slices.

    h       (n, T, R) of the pages' dtype, as `paged_shrink` gives it
    y       (T, >= N), rows may be further apart than N; slice i begins where slice i - 1 ends
    tuned   tile sizes, None = by shape

    Base rows of y are not touched.
    """
    tuned = tuned or paged_expand_tiles(len(y), pieces.rank, max(pieces.heights))
    # Hopper: programs may start while the product that makes h is ending ("programmatic dependent launch").
    overlap = can_overlap(y.device)
    blocks = sum(triton.cdiv(height, tuned.block_n) for height in pieces.heights)
    _paged_expand_kernel[(tiles.count, blocks)](
        h,
        pieces.pool,
        y,
        tiles.rows,
        tiles.tiles,
        pieces.table,
        pieces.ranks,
        pieces.rank,
        tiles.tiles.shape[1],
        pieces.ranks.stride(0),
        pieces.table.stride(0),
        pieces.page_stride,
        pieces.b,
        h.stride(0),
        y.stride(0),
        WIDTHS=pieces.heights,
        OVERLAP=overlap,
        ONE_BLOCK=pieces.rank <= tuned.block_r,
        EXPERTS=pieces.experts,
        PAGE_RANKS=pieces.page_ranks,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_R=tuned.block_r,
        BLOCK_N=tuned.block_n,
        SUM=sum_dtype(y.dtype),
        num_warps=tuned.num_warps,
        num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )
