"""A gather over processes in one kernel: each reads all parts where they are. Beside
vllm/csrc/custom_all_reduce.cuh (v0.22.1): there gathers are NCCL's.
"""

import torch
import triton
import triton.language as tl

from minivllm.parallel.peers.sum_op import (
    BYTES_A_PROGRAM,
    BYTES_AT_ONCE,
    LOOKS,
    Meetings,
    bring,
    come,
    programs_of,
    room_of,
    wait,
)

# Nothing is computed with what is gathered: so it is moved in words of so many bytes, whatever the dtype is.
BYTES_A_WORD = 4


@triton.jit(do_not_specialize=["pieces"])
def _peer_gather_kernel(
    x_ptr, y_ptr, rooms_ptr, flags_ptr, counts_ptr, stop_ptr, pieces, half,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    LOOKS: tl.constexpr,
):  # fmt: skip
    """y[row] = that row of every rank's x, side by side. Rows of x have WIDTH words.

    A program has the place of a sum's of its number, its flags and its count. So sums and gathers may take turns.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < pieces * PIECE
    x = tl.load(x_ptr + place, mask=inside)
    count = tl.load(counts_ptr + tl.program_id(0)) + 1
    there = (count & 1) * half + place
    bring(x, there, inside, rooms_ptr, RANK)
    come(count, flags_ptr, RANK, SIZE)
    wait(count, flags_ptr, counts_ptr, stop_ptr, RANK, SIZE, LOOKS)
    row, column = place // WIDTH, place % WIDTH
    for rank in tl.static_range(SIZE):
        part = tl.load(room_of(rooms_ptr, rank, tl.int32) + there, mask=inside, volatile=True)
        tl.store(y_ptr + (row * SIZE + rank) * WIDTH + column, part, mask=inside)


def peer_gather(x: torch.Tensor, meetings: Meetings, looks: int = LOOKS) -> torch.Tensor:
    """Every rank's x, side by side along the last dimension, bit by bit.   (..., n) -> (..., ranks * n)

    All ranks must call it with the same shape. Meetings are those of `peer_sum`, with which it shares them.

    x   contiguous, of any dtype, a multiple of 16 bytes, at most `half`; its rows are multiples of 4
    """
    rooms, flags, counts, stop, half, rank = meetings
    y = x.new_empty(*x.shape[:-1], len(rooms) * x.shape[-1])
    words = x.view(torch.int32)
    _peer_gather_kernel[(programs_of(x.nbytes),)](
        words, y.view(torch.int32), rooms, flags, counts, stop, x.nbytes // BYTES_AT_ONCE, half // BYTES_A_WORD,
        RANK=rank, SIZE=len(rooms), WIDTH=words.shape[-1], BLOCK=BYTES_A_PROGRAM // BYTES_A_WORD,
        PIECE=BYTES_AT_ONCE // BYTES_A_WORD, LOOKS=looks,
    )  # fmt: skip
    return y
