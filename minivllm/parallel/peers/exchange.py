"""How programs of the same number on all ranks exchange what they have: each writes its own into the others' memory.

A flag behind the data would cost a fence before it, and data that is fetched costs a read over the link. Here each
number is its own flag: a buffer holds zeros until numbers arrive, and a 0 is sent as -0.0. A number of 2 or 4 bytes is
seen whole or not at all, and the receiver looks at every one, so no order of stores matters. FlashInfer's Lamport
kernels do so, too, which vLLM has in vllm/compilation/passes/fusion/allreduce_rms_fusion.py (v0.22.1).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# What a program sends to one rank at once: numbers, and behind them so many of float32.
BYTES_OF_X = tl.constexpr(16384)
MOST_MORE = 32
BYTES_A_BUFFER = tl.constexpr(BYTES_OF_X.value + 4 * MOST_MORE)
# What a thread reads at once.
BYTES_AT_ONCE = 16
# So often a program looks for numbers before it asks the host whether a rank has ended. A look takes some tenths of a
# microsecond, what the host answers to all programs of a launch up to a millisecond. While these ask, the other rank
# waits for them; it must not begin to ask, too, or ranks keep each other late for good.
LOOKS = 1 << 18
# Part of a program's turn once it has found that a rank has ended: it waits for nobody any more.
ENDED = tl.constexpr(2)


class Exchange(NamedTuple):
    """What a rank needs to exchange numbers. All kernels share it.

    buffers  (ranks,) int64, where each rank has `bytes_of_buffers`, zeros at the start, at multiples of 16
    turns    (programs,) int32, zeros at the start: which half the program of a number uses next, in whatever kernel
    stop     (1,) int32 in the host's memory: once it is not 0, nobody waits any more, and results are wrong
    rank     which one this is
    """

    buffers: torch.Tensor
    turns: torch.Tensor
    stop: torch.Tensor
    rank: int


def bytes_of_buffers(programs: int, size: int) -> int:
    """What each of so many ranks has for what the others send: two halves for each program of each rank."""
    return programs * 2 * size * BYTES_A_BUFFER.value


@triton.jit
def buffer_of(buffers_ptr, receiver, sender, turn, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Where a rank finds what the program of this one's number on another rank sends, as integers of a dtype's size.

    Two halves take turns, which is enough: a sender comes back to a half only after it has received what the receiver
    sent in the turn between, and the receiver sent that after the kernel that read this half and left zeros there.
    """
    BITS: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    begin = ((tl.program_id(0) * 2 + (turn & 1)) * SIZE + sender) * BYTES_A_BUFFER
    return tl.multiple_of((tl.load(buffers_ptr + receiver) + begin).to(tl.pointer_type(BITS)), 16)


@triton.jit
def send(x, place, inside, turn, buffers_ptr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Write numbers to those places of this program's buffers at all other ranks."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            ptrs = buffer_of(buffers_ptr, rank, RANK, turn, SIZE, x.dtype) + place
            bits = x.to(ptrs.dtype.element_ty, bitcast=True)
            minus_zero = tl.full(bits.shape, 1, bits.dtype) << (x.dtype.primitive_bitwidth - 1)
            tl.store(ptrs, tl.where(bits == 0, minus_zero, bits), mask=inside)


@triton.jit
def receive(
    sender, place, inside, more_place, more_inside, turn, buffers_ptr, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, dtype: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """Wait for what a rank sends to those places, and leave zeros there for the next turn but one.

    Returns the numbers, 0 outside; the float32 numbers at `more_place`, None = there are none; and the turn, which has
    ENDED in it if the host has said that a rank has ended. Then numbers may be missing.
    """
    ptrs = buffer_of(buffers_ptr, RANK, sender, turn, SIZE, dtype) + place
    bits, more = tl.zeros(place.shape, ptrs.dtype.element_ty), 0
    if more_place is not None:
        more_ptrs = buffer_of(buffers_ptr, RANK, sender, turn, SIZE, tl.float32) + more_place
        more = tl.zeros(more_place.shape, tl.int32)
    looks, missing, stop = 0, 1, turn & ENDED
    while missing != 0:
        bits = tl.load(ptrs, mask=inside, other=0, volatile=True)
        is_missing = ((bits == 0) & inside & (stop == 0)).to(tl.int32)
        if more_place is not None:  # so few that every warp looks at all of them
            more = tl.load(more_ptrs, mask=more_inside, other=0, volatile=True)
            is_missing |= tl.max(((more == 0) & more_inside & (stop == 0)).to(tl.int32))
        # Over all threads of the program, so all of them leave the loop together.
        missing = tl.max(is_missing)
        looks += 1
        if looks % LOOKS == 0:
            # Threads may read it before and after it is set; those that have read it wait for the others.
            stop = tl.where(tl.load(stop_ptr, volatile=True) != 0, ENDED, 0)
    tl.debug_barrier()  # every thread has read what is cleared now
    tl.store(ptrs, tl.zeros(bits.shape, bits.dtype), mask=inside)
    if more_place is not None:
        tl.store(more_ptrs, tl.zeros(more.shape, more.dtype), mask=more_inside)
        more = more.to(tl.float32, bitcast=True)
    return bits.to(dtype, bitcast=True), more, turn | stop


@triton.jit
def end_turn(turn, turns_ptr):
    """The other half is next, for whatever kernel comes next."""
    tl.store(turns_ptr + tl.program_id(0), turn ^ 1)
