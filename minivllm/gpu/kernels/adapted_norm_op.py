"""The norm of a residual and an output, what adapters add to that included: it is read once and written nowhere.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM runs the norm.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import sum_dtype
from minivllm.gpu.kernels.paged_tuning import AdaptedNormTiles, adapted_norm_tiles
from minivllm.gpu.kernels.update import Update, begins_of_b, live_rank, read_ranks
from minivllm.gpu.sgmv.tuning import can_overlap


# This number differs between engines: not a variant of the kernel for each of its values.
@triton.jit(do_not_specialize=["table_row"])
def _adapted_norm_kernel(
    x_ptr,  # (T, H)
    residual_ptr,  # (T, H)
    weight_ptr,  # (H,)
    out_ptr,  # (T, H)
    slots_ptr,  # (T,) slot of each row, -1 = base
    h_ptr,  # (T, R), or of each slot one: see the strides
    b_ptr,
    table_ptr,  # (S, G) pages, or None
    ranks_ptr,  # (S,) live ranks, or None: all R
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
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SUM: tl.constexpr,  # dtype of sums
):
    """One program: one row. Nothing past a live rank is read, and of a base row neither h nor B.

    No tensor cores: a row has products of its own, as many as numbers that it reads.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    column, rank = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    inside = column < H
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(SUM)
    live = live_rank(ranks_ptr, slot, R)
    is_rank = (rank < R) & (slot >= 0)
    b_ptr += b_first
    begins = begins_of_b(
        b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride, rank, is_rank, PAGE_RANKS
    )
    in_b = column[:, None] * COLUMN_STRIDE  # (BLOCK, 1)
    b = read_ranks(begins[None, :] + in_b, rank, live, R, table_ptr, inside[:, None], 1)  # (BLOCK, BLOCK_R)
    # Up to here nothing depends on the product before; from here on, its h and its x must be there.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    h_ptr += row * h_row + slot * h_slot_stride
    h = tl.load(h_ptr + rank, mask=rank < live, other=0.0).to(SUM)
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(SUM)
    residual_ptrs = residual_ptr + row * residual_row + column
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(SUM)
    if live > 0:
        x += tl.sum(b.to(SUM) * h[None, :], axis=1)
        if not ONE_BLOCK:
            for start in range(BLOCK_R, live, BLOCK_R):
                rank = start + tl.arange(0, BLOCK_R)
                begins = begins_of_b(
                    b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride, rank, rank < R, PAGE_RANKS
                )
                b = read_ranks(begins[None, :] + in_b, rank, live, R, table_ptr, inside[:, None], 1)
                h = tl.load(h_ptr + rank, mask=rank < live, other=0.0).to(SUM)
                x += tl.sum(b.to(SUM) * h[None, :], axis=1)
    # The norm sees the sum as the residual stream keeps it: rounded.
    kept = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, kept, mask=inside)
    x = kept.to(SUM)
    tl.store(out_ptr + row * H + column, x * tl.rsqrt(tl.sum(x * x) / H + EPS) * weight, mask=inside)


def adapted_norm(
    update: Update,
    slots: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x: torch.Tensor,
    residual: torch.Tensor,
    tuned: AdaptedNormTiles | None = None,
) -> torch.Tensor:
    """residual += x and what its adapter adds, in place, rounded once; returns the norm of that.   -> (T, H)

    update  of one slice of H columns
    slots   (at least T,) int64 slot of each row, -1 = base
    weight  (H,)
    x       (T, H) without adapters, row stride of any width. Not changed
    residual  (T, H), row stride of any width
    tuned   tile sizes, None = by shape
    """
    tuned = tuned or adapted_norm_tiles(x.shape[1], update.rank, x.itemsize)
    out = x.new_empty(x.shape)
    overlap = can_overlap(x.device)
    _adapted_norm_kernel[(len(x),)](
        x,
        residual,
        weight,
        out,
        slots,
        update.h,
        update.b[0],
        update.table,
        update.ranks_of_first,
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
        ONE_BLOCK=update.rank <= tuned.block_r,
        PAGE_RANKS=update.page_ranks,
        BLOCK=triton.next_power_of_2(x.shape[1]),
        BLOCK_R=tuned.block_r,
        SUM=sum_dtype(x.dtype),
        num_warps=tuned.num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
