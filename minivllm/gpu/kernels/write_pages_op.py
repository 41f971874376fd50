"""All weights of an adapter into the pages of a slot, in one launch.

Beside `set_lora` in vllm/lora/layers/base_linear.py (v0.22.1), which knows no pages.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _write_pages_kernel(
    weights,  # one adapter's pieces, one after the other
    sources,  # (P, 3) int64: first element in `weights`, rows, columns
    places,  # (P, 5) int64: address in page 0, page stride in elements, width, 1 where ranks are columns (a B), ranks
    pages,  # (G,) int32
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    first = tl.load(sources + 3 * piece)
    rows = tl.load(sources + 3 * piece + 1).to(tl.int32)
    columns = tl.load(sources + 3 * piece + 2).to(tl.int32)
    place = tl.load(places + 5 * piece).to(tl.pointer_type(weights.dtype.element_ty))
    page_stride = tl.load(places + 5 * piece + 1)
    width = tl.load(places + 5 * piece + 2).to(tl.int32)
    is_b = tl.load(places + 5 * piece + 3) == 1
    page_ranks = tl.maximum(tl.load(places + 5 * piece + 4).to(tl.int32), 1)
    ranks = tl.where(is_b, columns, rows)
    cell = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (rows > 0) & (cell < rows * columns) & (width > 0)
    # In the order of the pages: what is written lies side by side.
    rank, column = cell // tl.maximum(width, 1), cell % tl.maximum(width, 1)
    source = tl.where(is_b, column * ranks + rank, cell)
    values = tl.load(weights + first + source, mask=there, other=0.0)
    page = tl.load(pages + rank // page_ranks, mask=there, other=0).to(tl.int64)
    tl.store(place + page * page_stride + rank % page_ranks * width + column, values, mask=there)


def write_pages(
    weights: torch.Tensor,
    sources: torch.Tensor,
    places: torch.Tensor,
    pages: torch.Tensor,
    largest: int,
) -> None:
    """Copy P pieces of an adapter, A (r, K) and B (N, r), to their places in a slot's pages.

    weights   (elements,) of the dtype of the pool
    sources   (P, 3) int64: first element in `weights`, rows, columns; 0 rows = the adapter has no such piece
    places    (P, 5) int64: address of the piece in page 0, from page to page in elements, K or N, 1 for a B, ranks in
              a page; width 0 = the piece is in no page
    pages     (G,) int32, the slot's
    largest   elements of the largest piece that there can be
    """
    grid = (len(places), triton.cdiv(largest, BLOCK))
    _write_pages_kernel[grid](weights, sources, places, pages, BLOCK=BLOCK)
