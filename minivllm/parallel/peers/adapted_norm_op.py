"""As `adapted_norm_op`, where the output is a sum over processes: it, and what adapters add, in one kernel.

Beside `AllReduceFusionPass` of vllm/compilation/passes/fusion/allreduce_rms_fusion.py (v0.22.1), which comes after the
adapters' expand.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_tuning import AdaptedNormTiles, adapted_norm_tiles
from minivllm.gpu.kernels.update import Update, begins_of_b, live_rank, read_ranks
from minivllm.parallel.peers.norm_op import add_and_norm
from minivllm.parallel.peers.sum_op import LOOKS
from minivllm.parallel.peers.words_op import WORDS, Words, numbers_of, push, receive_both, room_of


# This number differs between engines: not a variant of the kernel for each of its values.
@triton.jit(do_not_specialize=["table_row"])
def _adapted_peer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, slots_ptr, h_ptr, b_ptr, table_ptr, ranks_ptr,
    eps, b_first, table_row, x_row, residual_row, h_row, h_slot_stride, slot_stride, rank_stride,
    rooms_ptr, counts_ptr, ended_ptr, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, R: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
    PAGE_RANKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, ALL_R: tl.constexpr,
    NUMBERS: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """One program: one row. It brings its h with its x, as float32, and adds (the sum of h) · Bᵀ to the sum of x.

    Nothing past a live rank is read or brought, and of a base row neither h nor B.

    x_row    in words    ALL_R    no fewer than R    NUMBERS    in a word
    """
    row = tl.program_id(0)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    slot = tl.load(slots_ptr + row)
    column, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK // NUMBERS)
    inside, is_word = column < H, place < H // NUMBERS
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    live = live_rank(ranks_ptr, slot, R)
    rank_of_b, rank_of_h = tl.arange(0, BLOCK_R), tl.arange(0, ALL_R)
    is_rank, is_live = (rank_of_b < R) & (slot >= 0), rank_of_h < live
    b_ptr += b_first
    begins = begins_of_b(
        b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride, rank_of_b, is_rank, PAGE_RANKS
    )
    in_b = column[:, None] * COLUMN_STRIDE  # (BLOCK, 1)
    own = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + row * x_row + place, mask=is_word, other=0)
    count, ended = tl.load(counts_ptr + row) + 1, tl.load(ended_ptr + row)
    h_ptr += row.to(tl.int64) * h_row + slot * h_slot_stride
    own_h = tl.load(h_ptr + rank_of_h, mask=is_live, other=0.0).to(tl.float32)
    push(own, place, is_word, count, row, rooms_ptr, RANK, SIZE)
    push(own_h.to(tl.int32, bitcast=True), WORDS + rank_of_h, is_live, count, row, rooms_ptr, RANK, SIZE)
    # Read while the others' words are on their way.
    residual_ptrs = residual_ptr + row.to(tl.int64) * residual_row + column
    residual = tl.load(residual_ptrs, mask=inside, other=0.0)
    b = read_ranks(
        begins[None, :] + in_b, rank_of_b, live, R, table_ptr, inside[:, None], 1
    )  # (BLOCK, BLOCK_R)
    total, h = tl.zeros((BLOCK,), tl.float32), tl.zeros((ALL_R,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total, h = total + numbers_of(own, DTYPE).to(tl.float32), h + own_h
        else:
            theirs = room_of(rooms_ptr, RANK, rank, count, row, SIZE)
            data, more = receive_both(
                theirs + place, is_word, theirs + WORDS + rank_of_h, is_live,
                count, ended, ended_ptr + row, stop_ptr, LOOKS,
            )  # fmt: skip
            total += numbers_of(data, DTYPE).to(tl.float32)
            h += more.to(tl.float32, bitcast=True)
    tl.store(counts_ptr + row, count)
    # From here on as a sum and then `adapted_norm`: rounded where these round.
    x = total.to(DTYPE).to(tl.float32)
    if live > 0:
        x += tl.sum(b.to(tl.float32) * _ranks_of(h, rank_of_b, BLOCK_R, ALL_R)[None, :], axis=1)
        if ALL_R > BLOCK_R:
            for start in range(BLOCK_R, live, BLOCK_R):
                rank_of_b = start + tl.arange(0, BLOCK_R)
                begins = begins_of_b(
                    b_ptr,
                    table_ptr,
                    slot,
                    table_row,
                    slot_stride,
                    rank_stride,
                    rank_of_b,
                    rank_of_b < R,
                    PAGE_RANKS,
                )
                b = read_ranks(begins[None, :] + in_b, rank_of_b, live, R, table_ptr, inside[:, None], 1)
                x += tl.sum(b.to(tl.float32) * _ranks_of(h, rank_of_b, BLOCK_R, ALL_R)[None, :], axis=1)
    add_and_norm(x, residual, residual_ptrs, weight, y_ptr + row * H + column, inside, eps, H)


@triton.jit
def _ranks_of(h, rank, BLOCK_R: tl.constexpr, ALL_R: tl.constexpr):
    """Some ranks of h: (ALL_R,) -> (BLOCK_R,)"""
    if ALL_R > BLOCK_R:
        is_it = tl.arange(0, ALL_R)[:, None] == rank[None, :]
        h = tl.sum(tl.where(is_it, h[:, None], 0.0), axis=0)
    return h


def adapted_peer_norm(
    update: Update,
    slots: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    words: Words,
    x: torch.Tensor,
    residual: torch.Tensor,
    tuned: AdaptedNormTiles | None = None,
    looks: int = LOOKS,
) -> torch.Tensor:
    """residual += the sum of every rank's x and what its adapter adds, in place; returns the norm.   -> (T, H)

    The bits are those of `peer_sum`, and then `adapted_norm` with the sum of every rank's h. All ranks must call it
    with the same shapes, slots and live ranks.

    update    of one slice of H columns. Its h is this rank's term, its B the whole; R at most MORE_WORDS
    slots     (at least T,) int64 slot of each row, -1 = base
    x         (T, H) without adapters, as `packed_norm` takes it, but of any row stride that is a multiple of 4 bytes
    residual  (T, H), row stride of any width
    tuned     tile sizes, None = by shape
    looks     after so many at others' words comes one at `words.stop`
    """
    tuned = tuned or adapted_norm_tiles(x.shape[1], update.rank, x.itemsize)
    y, numbers = x.new_empty(x.shape), 4 // x.itemsize
    _adapted_peer_norm_kernel[(len(x),)](
        x, residual, weight, y, slots, update.h, update.b[0], update.table,
        update.ranks_of_first,
        eps, update.b_firsts[0], update.table_row,
        x.stride(0) // numbers, residual.stride(0), update.h.stride(1), update.h_slot_stride,
        update.slot_strides[0], update.rank_strides[0], *words[:4],
        RANK=words.rank, SIZE=len(words.rooms), H=x.shape[1], R=update.rank, COLUMN_STRIDE=update.column_stride,
        PAGE_RANKS=update.page_ranks, BLOCK=triton.next_power_of_2(x.shape[1]), BLOCK_R=tuned.block_r,
        ALL_R=max(tuned.block_r, triton.next_power_of_2(update.rank)), NUMBERS=numbers, LOOKS=looks,
        num_warps=tuned.num_warps,
    )  # fmt: skip
    return y
