"""As `adapted_norm_op`, where the output is a sum over processes: it, and what adapters add, in one kernel.

Beside `AllReduceFusionPass` of vllm/compilation/passes/fusion/allreduce_rms_fusion.py (v0.22.1), which comes after the
adapters' expand.
"""

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import add_ranks_of_row, read_b, row_times_b, rows_of_ranks
from minivllm.gpu.kernels.paged_tuning import AdaptedNormTiles, adapted_norm_tiles
from minivllm.gpu.kernels.update import Update
from minivllm.parallel.peers.norm_op import add_and_norm
from minivllm.parallel.peers.sum_op import LOOKS
from minivllm.parallel.peers.words_op import WORDS, Words, numbers_of, push, receive_both, room_of


# This number differs between engines: not a variant of the kernel for each of its values.
@triton.jit(do_not_specialize=["table_row"])
def _adapted_peer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, slots_ptr, h_ptr, pool_ptr, table_ptr, ranks_ptr,
    eps, b_place, table_row, page_stride, x_row, residual_row,
    rooms_ptr, counts_ptr, ended_ptr, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
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
    is_slot = slot >= 0
    live = tl.load(ranks_ptr + slot, mask=is_slot, other=0)
    rank_of_b, rank_of_h = tl.arange(0, BLOCK_R), tl.arange(0, ALL_R)
    is_live = rank_of_h < live
    begin_ptr = pool_ptr + b_place
    table_ptr += slot * table_row
    rows_of_b = rows_of_ranks(
        begin_ptr, table_ptr, page_stride, rank_of_b, (rank_of_b < R) & is_slot, 0, H, PAGE_RANKS
    )
    own = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + row * x_row + place, mask=is_word, other=0)
    count, ended = tl.load(counts_ptr + row) + 1, tl.load(ended_ptr + row)
    h_ptr += row.to(tl.int64) * R
    own_h = tl.load(h_ptr + rank_of_h, mask=is_live, other=0.0).to(tl.float32)
    push(own, place, is_word, count, row, rooms_ptr, RANK, SIZE)
    push(own_h.to(tl.int32, bitcast=True), WORDS + rank_of_h, is_live, count, row, rooms_ptr, RANK, SIZE)
    # Read while the others' words are on their way.
    residual_ptrs = residual_ptr + row.to(tl.int64) * residual_row + column
    residual = tl.load(residual_ptrs, mask=inside, other=0.0)
    b = read_b(rows_of_b, column, inside, rank_of_b, live)  # (BLOCK_R, BLOCK)
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
        x += row_times_b(h, rank_of_b, b, ALL_R, BLOCK_R)
        if R > BLOCK_R:
            x = add_ranks_of_row(
                x, BLOCK_R, live, h, begin_ptr, table_ptr, page_stride, column, inside, H, PAGE_RANKS, BLOCK_R, ALL_R
            )  # fmt: skip
    add_and_norm(x, residual, residual_ptrs, weight, y_ptr + row * H + column, inside, eps, H)


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
    pieces = update.pieces
    tuned = tuned or adapted_norm_tiles(x.shape[1], pieces.rank, x.itemsize)
    y, numbers = x.new_empty(x.shape), 4 // x.itemsize
    _adapted_peer_norm_kernel[(len(x),)](
        x, residual, weight, y, slots, update.h, pieces.pool, pieces.table, pieces.ranks,
        eps, pieces.b[0], pieces.table.stride(0), pieces.page_stride, x.stride(0) // numbers, residual.stride(0),
        *words[:4],
        RANK=words.rank, SIZE=len(words.rooms), H=x.shape[1], R=pieces.rank, PAGE_RANKS=pieces.page_ranks,
        BLOCK=triton.next_power_of_2(x.shape[1]), BLOCK_R=tuned.block_r,
        ALL_R=max(tuned.block_r, triton.next_power_of_2(pieces.rank)), NUMBERS=numbers, LOOKS=looks,
        num_warps=tuned.num_warps,
    )  # fmt: skip
    return y
