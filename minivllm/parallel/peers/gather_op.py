"""A gather over processes in one kernel: each has what the others send. Beside
vllm/csrc/custom_all_reduce.cuh (v0.22.1): there gathers are NCCL's.
"""

import torch
import triton
import triton.language as tl

from minivllm.parallel.peers.exchange import BYTES_AT_ONCE, LOOKS, Exchange, end_turn, receive, send
from minivllm.parallel.peers.sum_op import BYTES_A_PROGRAM, programs_of


@triton.jit(do_not_specialize=["pieces"])
def _peer_gather_kernel(
    x_ptr, y_ptr, buffers_ptr, turns_ptr, stop_ptr, pieces,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    LOOKS: tl.constexpr,
):  # fmt: skip
    """y[row] = that row of every rank's x, side by side. Rows of x have WIDTH numbers."""
    place = tl.arange(0, BLOCK)
    number = tl.program_id(0) * BLOCK + place
    inside = number < pieces * PIECE
    x = tl.load(x_ptr + number, mask=inside, other=0.0)
    turn = tl.load(turns_ptr + tl.program_id(0))
    send(x, place, inside, turn, buffers_ptr, RANK, SIZE)
    row, column = number // WIDTH, number % WIDTH
    for rank in tl.static_range(SIZE):
        part = x
        if rank != RANK:
            part, _, turn = receive(
                rank, place, inside, None, None, turn, buffers_ptr, stop_ptr, RANK, SIZE, x.dtype, LOOKS
            )
        part = tl.where(part == 0, 0.0, part)  # no rank has another zero than others
        tl.store(y_ptr + (row * SIZE + rank) * WIDTH + column, part, mask=inside)
    end_turn(turn, turns_ptr)


def peer_gather(x: torch.Tensor, exchange: Exchange, looks: int = LOOKS) -> torch.Tensor:
    """Every rank's x, side by side along the last dimension.   (..., n) -> (..., ranks * n)

    All ranks must call it with the same shape; all get the same bits, those of each x but for -0.0, which becomes 0.

    x   contiguous, of floats, a multiple of 16 bytes, of no more than `exchange` has programs for
    """
    buffers, turns, stop, rank = exchange
    y = x.new_empty(*x.shape[:-1], len(buffers) * x.shape[-1])
    _peer_gather_kernel[(programs_of(x.nbytes),)](
        x, y, buffers, turns, stop, x.nbytes // BYTES_AT_ONCE,
        RANK=rank, SIZE=len(buffers), WIDTH=x.shape[-1], BLOCK=BYTES_A_PROGRAM // x.itemsize,
        PIECE=BYTES_AT_ONCE // x.itemsize, LOOKS=looks,
    )  # fmt: skip
    return y
