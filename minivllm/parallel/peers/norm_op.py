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
from minivllm.parallel.peers.sum_op import BYTES_A_ROW, BYTES_OF_X, LOOKS, Meetings, bring, come, sum_of, wait


# This number differs between engines: not a variant of the kernel for each of its values.
@triton.jit(do_not_specialize=["table_row"])
def _peer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, eps, x_row, residual_row,
    slots_ptr, h_ptr, pool_ptr, table_ptr, ranks_ptr, b_place, table_row, page_stride,
    rooms_ptr, flags_ptr, counts_ptr, stop_ptr, half,
    RANK: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
    R: tl.constexpr, PAGE_RANKS: tl.constexpr, BLOCK_R: tl.constexpr, ALL_R: tl.constexpr,
    COPIES: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """residual[row] += the sum of all ranks' x[row], in the order of ranks, and (the sum of h[row]) · Bᵀ; y[row] = its
    norm. A program has a row. slots_ptr: None = no adapters. Of a base row neither h nor B is read, of others nothing
    past the live rank.

    A program has the flags and the count of a sum's of its number, but its place is in rooms where sums have none. In
    the sums' it would be that of programs which have met more often or less often than this one. Then this one could
    write the half that another rank's program of another number still reads: it has never waited for that one.
    So norms may take turns with sums and gathers: a count goes on through all, and a half that norms come to was last
    used two meetings ago, or earlier, by the same program.

    half, ROOM   in numbers of x's dtype    ALL_R   no fewer than R    COPIES   of ALL_R: no fewer than threads
    """
    row = tl.program_id(0)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SIZE_OF_X: tl.constexpr = DTYPE.primitive_bitwidth // 8
    column = tl.arange(0, BLOCK)
    inside = column < H
    count = tl.load(counts_ptr + row) + 1
    begin = (count & 1) * half + row * ROOM
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row)
        rank_of_b, rank_of_h = tl.arange(0, BLOCK_R), tl.arange(0, ALL_R)
        live = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
        h = tl.load(h_ptr + row.to(tl.int64) * R + rank_of_h, mask=rank_of_h < live, other=0.0)
        h_place = (begin * SIZE_OF_X + BYTES_OF_X) // 4 + rank_of_h
        bring(h.to(tl.float32), h_place, rank_of_h < live, rooms_ptr, RANK)
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0)
    bring(x, begin + column, inside, rooms_ptr, RANK)
    come(count, flags_ptr, RANK, SIZE)
    # Read while the others are waited for.
    residual_ptrs = residual_ptr + row.to(tl.int64) * residual_row + column
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if slots_ptr is not None:
        begin_ptr = pool_ptr + b_place
        table_ptr += slot * table_row
        is_read = (rank_of_b < R) & (slot >= 0)
        rows_of_b = rows_of_ranks(begin_ptr, table_ptr, page_stride, rank_of_b, is_read, 0, H, PAGE_RANKS)
        b = read_b(rows_of_b, column, inside, rank_of_b, live)  # (BLOCK_R, BLOCK)
    wait(count, flags_ptr, counts_ptr, stop_ptr, RANK, SIZE, LOOKS)
    if slots_ptr is not None:
        # One thread loads a number, and the others get it from there. Of fewer numbers than threads the compiler would
        # have every thread that needs one load it over the link.
        is_loaded = (tl.arange(0, COPIES)[:, None] == 0) & (rank_of_h < live)[None, :]
        places = tl.arange(0, COPIES)[:, None] * 0 + h_place[None, :]
        all_h = tl.sum(sum_of(places, is_loaded, rooms_ptr, SIZE, tl.float32), axis=0)  # (ALL_R,)
    # From here on as a sum and then a norm: rounded where these round.
    total = sum_of(begin + column, inside, rooms_ptr, SIZE, DTYPE).to(DTYPE).to(tl.float32)
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
    meetings: Meetings,
    update: Update | None = None,
    slots: torch.Tensor | None = None,
    tuned: AdaptedNormTiles | None = None,
    looks: int = LOOKS,
) -> torch.Tensor:
    """residual += the sum of every rank's x, and what adapters add to it, in place; the RMS norm of that.

    All ranks get the same bits: those of `peer_sum`, and then `fused_add_rms_norm`, or `adapted_norm` with the sum of
    every rank's h. All ranks must call it with the same shapes, slots and live ranks.

    x         (T, H), row stride of any width; rows are multiples of 16 bytes, at most BYTES_OF_X
    residual  (T, H), row stride of any width
    weight    (H,) -> (T, H) contiguous
    meetings  rooms have `half` bytes twice for norms alone, BYTES_A_ROW for each of as many rows as there may be.
              Flags and counts are those of `peer_sum`: as many programs as rows, or more
    update    of one slice of H columns. Its h is this rank's term, its B the whole; R at most MOST_RANKS
    slots     (at least T,) int64 slot of each row, -1 = base
    tuned     tile sizes, None = by shape
    """
    rooms, flags, counts, stop, half, rank = meetings
    y, block = x.new_empty(x.shape), triton.next_power_of_2(x.shape[1])
    adapters, sizes, num_warps = (
        [None] * 8,
        {"R": 0, "PAGE_RANKS": 0, "BLOCK_R": 0, "ALL_R": 0, "COPIES": 0},
        warps_of(block),
    )
    if update is not None:
        pieces = update.pieces
        tuned = tuned or adapted_norm_tiles(x.shape[1], pieces.rank, x.itemsize)
        num_warps, all_ranks = tuned.num_warps, max(tuned.block_r, triton.next_power_of_2(pieces.rank))
        adapters = [
            *(slots, update.h, pieces.pool, pieces.table, pieces.ranks),
            *(pieces.b[0], pieces.table.stride(0), pieces.page_stride),
        ]
        sizes = {
            "R": pieces.rank, "PAGE_RANKS": pieces.page_ranks, "BLOCK_R": tuned.block_r, "ALL_R": all_ranks,
            "COPIES": max(32 * num_warps // all_ranks, 1),
        }  # fmt: skip
    _peer_norm_kernel[(len(x),)](
        x, residual, weight, y, eps, x.stride(0), residual.stride(0), *adapters,
        rooms, flags, counts, stop, half // x.itemsize,
        RANK=rank, SIZE=len(rooms), H=x.shape[1], BLOCK=block, ROOM=BYTES_A_ROW // x.itemsize, **sizes, LOOKS=looks,
        num_warps=num_warps,
    )  # fmt: skip
    return y


def warps_of(block: int) -> int:
    """As many as `fused_add_rms_norm` has: squares are added up in an order that depends on it."""
    return min(max(block // 512, 1), 16)
