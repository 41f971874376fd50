"""A sum over processes in one kernel: each has what the others send. Stands for `cross_device_reduce_1stage` of
vllm/csrc/custom_all_reduce.cuh (v0.22.1).
"""

import torch
import triton
import triton.language as tl

from minivllm.parallel.peers.exchange import BYTES_AT_ONCE, LOOKS, Exchange, end_turn, receive, send

# What a program adds up, whatever the dtype is.
BYTES_A_PROGRAM = 4096


@triton.jit(do_not_specialize=["pieces"])
def _peer_sum_kernel(
    x_ptr, y_ptr, buffers_ptr, turns_ptr, stop_ptr, pieces,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """y = the sum of all ranks' x, in the order of ranks."""
    place = tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + place
    inside = column < pieces * PIECE
    x = tl.load(x_ptr + column, mask=inside, other=0.0)
    turn = tl.load(turns_ptr + tl.program_id(0))
    send(x, place, inside, turn, buffers_ptr, RANK, SIZE)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        term = x
        if rank != RANK:
            term, _, turn = receive(
                rank, place, inside, None, None, turn, buffers_ptr, stop_ptr, RANK, SIZE, x.dtype, LOOKS
            )
        total += term.to(tl.float32)
    end_turn(turn, turns_ptr)
    tl.store(y_ptr + column, total, mask=inside)


def programs_of(nbytes: int) -> int:
    return -(-nbytes // BYTES_A_PROGRAM)


def peer_sum(x: torch.Tensor, exchange: Exchange, looks: int = LOOKS) -> torch.Tensor:
    """The sum of every rank's x. All ranks must call it with as many elements; all get the same bits.

    x       contiguous, a multiple of 16 bytes, of no more than `exchange` has programs for
    looks   after so many at what another rank sends comes one at `stop`
    """
    y = torch.empty_like(x)
    buffers, turns, stop, rank = exchange
    _peer_sum_kernel[(programs_of(x.nbytes),)](
        x, y, buffers, turns, stop, x.nbytes // BYTES_AT_ONCE,
        RANK=rank, SIZE=len(buffers), BLOCK=BYTES_A_PROGRAM // x.itemsize, PIECE=BYTES_AT_ONCE // x.itemsize,
        LOOKS=looks,
    )  # fmt: skip
    return y
