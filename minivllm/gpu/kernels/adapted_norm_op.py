"""The norm of a residual and an output, what adapters add to that included: it is read once and written nowhere.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), after which vLLM runs the norm.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import (
    add_ranks_of_row,
    read_b,
    row_times_b,
    rows_of_ranks,
    sum_dtype,
)
from minivllm.gpu.kernels.paged_tuning import AdaptedNormTiles, adapted_norm_tiles
from minivllm.gpu.kernels.update import Update
from minivllm.gpu.sgmv.tuning import can_overlap


# This number differs between engines: not a variant of the kernel for each of its values.
@triton.jit(do_not_specialize=["table_row"])
def _adapted_norm_kernel(
    x_ptr,  # (T, H)
    residual_ptr,  # (T, H)
    weight_ptr,  # (H,)
    out_ptr,  # (T, H)
    slots_ptr,  # (T,) slot of each row, -1 = base
    h_ptr,  # (T, R)
    pool_ptr,  # pages
    table_ptr,  # (S, G) pages
    ranks_ptr,  # (S,) live ranks
    b_place,  # where B begins in a page
    table_row,
    page_stride,
    x_row,
    residual_row,
    H: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALL_R: tl.constexpr,  # no fewer than R
    SUM: tl.constexpr,  # dtype of sums
):
    """One program: one row. Nothing past a live rank is read, and of a base row neither h nor B.

    No tensor cores: a row has products of its own, as many as numbers that it reads.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    column, rank, all_ranks = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R), tl.arange(0, ALL_R)
    inside = column < H
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(SUM)
    is_slot = slot >= 0
    live = tl.load(ranks_ptr + slot, mask=is_slot, other=0)
    begin_ptr = pool_ptr + b_place
    table_ptr += slot * table_row
    rows_of_b = rows_of_ranks(begin_ptr, table_ptr, page_stride, rank, (rank < R) & is_slot, 0, H, PAGE_RANKS)
    b = read_b(rows_of_b, column, inside, rank, live)  # (BLOCK_R, BLOCK)
    # Up to here nothing depends on the product before; from here on, its h and its x must be there.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    h = tl.load(h_ptr + row * R + all_ranks, mask=all_ranks < live, other=0.0).to(SUM)
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(SUM)
    residual_ptrs = residual_ptr + row * residual_row + column
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(SUM)
    if live > 0:
        x += row_times_b(h, rank, b, ALL_R, BLOCK_R)
        if R > BLOCK_R:
            x = add_ranks_of_row(
                x, BLOCK_R, live, h, begin_ptr, table_ptr, page_stride, column, inside, H, PAGE_RANKS, BLOCK_R, ALL_R
            )  # fmt: skip
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
    pieces = update.pieces
    tuned = tuned or adapted_norm_tiles(x.shape[1], pieces.rank, x.itemsize)
    out = x.new_empty(x.shape)
    overlap = can_overlap(x.device)
    _adapted_norm_kernel[(len(x),)](
        x,
        residual,
        weight,
        out,
        slots,
        update.h,
        pieces.pool,
        pieces.table,
        pieces.ranks,
        pieces.b[0],
        pieces.table.stride(0),
        pieces.page_stride,
        x.stride(0),
        residual.stride(0),
        H=x.shape[1],
        R=pieces.rank,
        EPS=eps,
        OVERLAP=overlap,
        PAGE_RANKS=pieces.page_ranks,
        BLOCK=triton.next_power_of_2(x.shape[1]),
        BLOCK_R=tuned.block_r,
        ALL_R=max(tuned.block_r, triton.next_power_of_2(pieces.rank)),
        SUM=sum_dtype(x.dtype),
        num_warps=tuned.num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
