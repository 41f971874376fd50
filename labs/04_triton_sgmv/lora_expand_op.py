"""y += h · Bᵀ, every row with its own adapter's B. Stands for vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1)."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.tuning import can_overlap, expand_tiles


# region lab 4.3: the expand kernel
# These strides differ from step to step: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["h_split_stride", "h_slice_stride"])
def _lora_expand_kernel(
    h_ptr,  # (splits, n, T, R)
    b_ptrs,  # n x (S, N_i, R)
    y_ptr,  # (T, >= N)
    rows_ptr,  # (T,) rows by slot
    tiles_ptr,  # (3, capacity) slot, first row, rows
    ranks_ptr,  # (n, S) live ranks, or None: all R
    R,
    capacity,
    num_slots,
    h_split_stride,
    h_slice_stride,
    h_row_stride,
    b_slot_strides,  # n
    b_row_stride,
    y_row_stride,
    WIDTHS: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one tile of rows, one block of columns of one slice.

    y[row, offset of slice i + column] += sum over splits of h[split, i, row] · B_i[slot, column]; = without ADD.
    Axis 0 of the grid counts tiles (slot -1 is none), axis 1 blocks of BLOCK_N columns: those of slice 0, then those of
    slice 1, and so on. A slice need not fill its last block, nor R its one block of BLOCK_R.
    h and B past the live rank may hold anything and are not read. Planes are summed in float32 and multiplied in B's
    dtype, with input_precision="ieee", into float32. Row and slot numbers in int64.
    With OVERLAP the kernels ahead may still run: tl.extra.cuda.gdc_wait() before h or y is read, and before any return.
    """
    tl.static_assert(False, "lab 4.3: the expand kernel")


# endregion


def expand(
    h: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    y: torch.Tensor,
    tiles: TileList,
    ranks: torch.Tensor | None = None,
    add_inputs: bool = True,
) -> None:
    """y[:, slice i] += h[i] · B_iᵀ, in place. One launch for all slices.

    h       (splits, n, T, R): planes to be added up, rank contiguous
    lora_b  n x (S, N_i, R) of one row stride, rank contiguous; slice i begins where slice i - 1 ends
    y       (T, >= N), rows may be further apart than N
    ranks   (n, S) int32 live rank of each slice and slot; None = R everywhere

    Base rows of y are not touched.
    """
    num_slots, _, rank = lora_b[0].shape
    widths = tuple(b.shape[1] for b in lora_b)
    tuned = expand_tiles(len(y), rank, max(widths))
    # Hopper: programs may start while the product that makes h is ending ("programmatic dependent launch").
    overlap = can_overlap(y.device)
    blocks = sum(triton.cdiv(width, tuned.block_n) for width in widths)
    _lora_expand_kernel[(tiles.count, blocks)](
        h,
        tuple(lora_b),
        y,
        tiles.rows,
        tiles.tiles,
        ranks,
        rank,
        tiles.tiles.shape[1],
        num_slots,
        h.stride(0),
        h.stride(1),
        h.stride(2),
        tuple(b.stride(0) for b in lora_b),
        lora_b[0].stride(1),
        y.stride(0),
        WIDTHS=widths,
        SPLITS=len(h),
        ADD=add_inputs,
        OVERLAP=overlap,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
        BLOCK_N=tuned.block_n,
        num_warps=tuned.num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
