"""All weights of an adapter into one slot of every layer, in one launch.

Stands for `set_lora` in vllm/lora/layers/base_linear.py (v0.22.1), which copies tensor by tensor.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _write_slot_kernel(
    weights,  # one adapter's pieces, one after the other
    sources,  # (P, 3) int64: first element in `weights`, rows, columns
    places,  # (P, 6) int64: address, slot stride, row stride, column stride, rows, columns; strides in elements
    slot,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    first = tl.load(sources + 3 * piece)
    live_rows = tl.load(sources + 3 * piece + 1).to(tl.int32)
    live_columns = tl.load(sources + 3 * piece + 2).to(tl.int32)
    place = tl.load(places + 6 * piece).to(tl.pointer_type(weights.dtype.element_ty))
    slot_stride = tl.load(places + 6 * piece + 1)
    row_stride = tl.load(places + 6 * piece + 2)
    column_stride = tl.load(places + 6 * piece + 3)
    rows = tl.load(places + 6 * piece + 4).to(tl.int32)
    columns = tl.load(places + 6 * piece + 5).to(tl.int32)
    cell = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, column = cell // columns, cell % columns
    live = (row < live_rows) & (column < live_columns)
    # Zeros past the live rank: what the slot held before is gone with the same launch.
    values = tl.load(weights + first + row * live_columns + column, mask=live, other=0.0)
    tl.store(place + slot * slot_stride + row * row_stride + column * column_stride, values, mask=row < rows)


def write_slot(
    weights: torch.Tensor, sources: torch.Tensor, places: torch.Tensor, slot: int, largest: int
) -> None:
    """Copy P pieces of an adapter to their places in a slot, with zeros where a place is larger than its piece.

    weights   (elements,) of the dtype of all places
    sources   (P, 3) int64: first element in `weights`, rows, columns; 0 rows = the adapter has no such piece
    places    (P, 6) int64: address of slot 0, strides of slot, row and column in elements, rows, columns
    largest   rows * columns of the largest place
    """
    grid = (len(places), triton.cdiv(largest, BLOCK))
    _write_slot_kernel[grid](weights, sources, places, slot, BLOCK=BLOCK)
