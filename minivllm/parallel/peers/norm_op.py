"""A sum over processes, what adapters add to it, the residual's and the norm of that, in one kernel. vLLM has its
compiler put a sum and a norm together, before what adapters add: `AllReduceFusionPass` of
vllm/compilation/passes/fusion/allreduce_rms_fusion.py (v0.22.1), by FlashInfer's kernels.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import add_ranks_of_row, read_b, row_times_b, rows_of_ranks
from minivllm.gpu.kernels.paged_tuning import AdaptedNormTiles, adapted_norm_tiles
from minivllm.gpu.kernels.update import Update
from minivllm.parallel.peers.exchange import BYTES_OF_X, LOOKS, Exchange, end_turn, receive, send


# This number differs between engines: not a variant of the kernel for each of its values.
@triton.jit(do_not_specialize=["table_row"])
def _peer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, eps, x_row, residual_row,
    slots_ptr, h_ptr, pool_ptr, table_ptr, ranks_ptr, b_place, table_row, page_stride,
    buffers_ptr, turns_ptr, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    R: tl.constexpr, PAGE_RANKS: tl.constexpr, BLOCK_R: tl.constexpr, ALL_R: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """residual[row] += the sum of all ranks' x[row], in the order of ranks, and (the sum of h[row]) · Bᵀ; y[row] = its
    norm. A program has a row. slots_ptr: None = no adapters. Of a base row neither h nor B is read, of others nothing
    past the live rank.

    ALL_R   no fewer than R
    """
    row = tl.program_id(0)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < H
    h_place, is_live, all_h = None, None, 0.0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row)
        rank_of_b, rank_of_h = tl.arange(0, BLOCK_R), tl.arange(0, ALL_R)
        live = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
        begin_ptr = pool_ptr + b_place
        table_ptr += slot * table_row
        is_read = (rank_of_b < R) & (slot >= 0)
        rows_of_b = rows_of_ranks(begin_ptr, table_ptr, page_stride, rank_of_b, is_read, 0, H, PAGE_RANKS)
        h_place, is_live = rank_of_h + BYTES_OF_X // 4, rank_of_h < live
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0)
    turn = tl.load(turns_ptr + row)
    send(x, column, inside, turn, buffers_ptr, RANK, SIZE)
    if slots_ptr is not None:
        h = tl.load(h_ptr + row.to(tl.int64) * R + rank_of_h, mask=is_live, other=0.0).to(tl.float32)
        send(h, h_place, is_live, turn, buffers_ptr, RANK, SIZE)
    # Read while what others send is on its way.
    residual_ptrs = residual_ptr + row.to(tl.int64) * residual_row + column
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if slots_ptr is not None:
        b = read_b(rows_of_b, column, inside, rank_of_b, live)  # (BLOCK_R, BLOCK)
        all_h = tl.zeros((ALL_R,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += x.to(tl.float32)
            if slots_ptr is not None:
                all_h += h
        else:
            term, more, turn = receive(
                rank, column, inside, h_place, is_live, turn, buffers_ptr, stop_ptr, RANK, SIZE, DTYPE, LOOKS
            )
            total += term.to(tl.float32)
            all_h += more
    end_turn(turn, turns_ptr)
    # From here on as a sum and then a norm: rounded where these round.
    total = total.to(DTYPE).to(tl.float32)
    if slots_ptr is not None:  # noqa: SIM102  an "and" would compute both
        if live > 0:
            total += row_times_b(all_h, rank_of_b, b, ALL_R, BLOCK_R)
            if R > BLOCK_R:
                total = add_ranks_of_row(
                    total, BLOCK_R, live, all_h, begin_ptr, table_ptr, page_stride, column, inside, H,
                    PAGE_RANKS, BLOCK_R, ALL_R,
                )  # fmt: skip
    kept = (total + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, kept, mask=inside)
    stream = kept.to(tl.float32)
    y = stream * tl.rsqrt(tl.sum(stream * stream) / H + eps) * weight
    tl.store(y_ptr + row * H + column, y, mask=inside)


def peer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    exchange: Exchange,
    update: Update | None = None,
    slots: torch.Tensor | None = None,
    tuned: AdaptedNormTiles | None = None,
    looks: int = LOOKS,
) -> torch.Tensor:
    """residual += the sum of every rank's x, and what adapters add to it, in place; the RMS norm of that.

    All ranks get the same bits: those of `peer_sum`, and then `fused_add_rms_norm`, or `adapted_norm` with the sum of
    every rank's h. All ranks must call it with the same shapes, slots and live ranks.

    x         (T, H), row stride of any width; a row has at most BYTES_OF_X
    residual  (T, H), row stride of any width
    weight    (H,) -> (T, H) contiguous
    exchange  of as many programs as rows, or more
    update    of one slice of H columns. Its h is this rank's term, its B the whole; R at most MOST_MORE
    slots     (at least T,) int64 slot of each row, -1 = base
    tuned     tile sizes, None = by shape
    """
    buffers, turns, stop, rank = exchange
    y, block = x.new_empty(x.shape), triton.next_power_of_2(x.shape[1])
    adapters, sizes, num_warps = (
        [None] * 8,
        dict.fromkeys(("R", "PAGE_RANKS", "BLOCK_R", "ALL_R"), 0),
        warps_of(block),
    )
    if update is not None:
        pieces = update.pieces
        tuned = tuned or adapted_norm_tiles(x.shape[1], pieces.rank, x.itemsize)
        num_warps = tuned.num_warps
        adapters = [
            *(slots, update.h, pieces.pool, pieces.table, pieces.ranks),
            *(pieces.b[0], pieces.table.stride(0), pieces.page_stride),
        ]
        sizes = {
            "R": pieces.rank, "PAGE_RANKS": pieces.page_ranks, "BLOCK_R": tuned.block_r,
            "ALL_R": max(tuned.block_r, triton.next_power_of_2(pieces.rank)),
        }  # fmt: skip
    _peer_norm_kernel[(len(x),)](
        x, residual, weight, y, eps, x.stride(0), residual.stride(0), *adapters, buffers, turns, stop,
        RANK=rank, SIZE=len(buffers), H=x.shape[1], BLOCK=block, **sizes, LOOKS=looks, num_warps=num_warps,
    )  # fmt: skip
    return y


def warps_of(block: int) -> int:
    """As many as `fused_add_rms_norm` has: squares are added up in an order that depends on it."""
    return min(max(block // 512, 1), 16)
