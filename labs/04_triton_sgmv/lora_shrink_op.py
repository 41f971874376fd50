"""h = x · Aᵀ, every row with its own adapter's A. Stands for vllm/lora/ops/triton_ops/lora_shrink_op.py (v0.22.1)."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.tuning import shrink_tiles


# region lab 4.2: the shrink kernel
# These strides differ from step to step: not a variant of the kernel for each of their values.
@triton.jit(do_not_specialize=["h_split_stride", "h_slice_stride"])
def _lora_shrink_kernel(
    x_ptr,  # (T, K)
    a_ptrs,  # n x (S, R, K)
    h_ptr,  # (splits, n, T, R) float32
    rows_ptr,  # (T,) rows by slot
    tiles_ptr,  # (3, capacity) slot, first row, rows
    ranks_ptr,  # (n, S) live ranks, or None: all R
    scaling,
    K,
    R,
    capacity,
    num_slots,
    x_row_stride,
    a_slot_stride,
    a_rank_stride,
    h_split_stride,
    h_slice_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program: one tile of rows, every SPLITS-th block of K, all slices.

    h[split, i, row] = scaling * x[row] · A_i[slot]ᵀ, summed over blocks split, split + SPLITS, ... of BLOCK_K columns.
    Axis 0 of the grid counts tiles, axis 1 splits; a tile of slot -1 is none. K and R need not fill their blocks.
    A past the live rank may hold anything: it is not read, and h is zero there, also where nothing is live.
    x is (T, K) with rows `x_row_stride` apart; rows of h are R apart; rows of A `a_rank_stride`. Products in x's dtype
    with input_precision="ieee", sums in float32. Row and slot numbers in int64: their offsets may not fit in 32 bits.
    """
    tl.static_assert(False, "lab 4.2: the shrink kernel")


# endregion


def shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    tiles: TileList,
    ranks: torch.Tensor | None = None,
    scaling: float = 1.0,
    splits: int | None = None,
    h: torch.Tensor | None = None,
) -> torch.Tensor:
    """Partial sums of h = scaling * x · Aᵀ, to be added up by `expand`. One launch for all slices.

    x       (T, K), rows may be further apart than K
    lora_a  n x (S, R, K) of one shape and strides, K contiguous
    ranks   (n, S) int32 live rank of each slice and slot; None = R everywhere
    splits  planes, None = by shape
    h       where to write, None = new memory

    Returns h (splits, n, T, R) float32: one plane for each share of K. Base rows are not written.
    """
    num_slots, rank, width = lora_a[0].shape
    tuned = shrink_tiles(len(x), width, rank, tiles.count)
    if h is None:
        size = splits or tuned.splits, len(lora_a), len(x), rank
        h = torch.empty(size, dtype=torch.float32, device=x.device)
    _lora_shrink_kernel[(tiles.count, len(h))](
        x,
        tuple(lora_a),
        h,
        tiles.rows,
        tiles.tiles,
        ranks,
        scaling,
        width,
        rank,
        tiles.tiles.shape[1],
        num_slots,
        x.stride(0),
        lora_a[0].stride(0),
        lora_a[0].stride(1),
        h.stride(0),
        h.stride(1),
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
        BLOCK_K=tuned.block_k,
        SPLITS=len(h),
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
    )
    return h
