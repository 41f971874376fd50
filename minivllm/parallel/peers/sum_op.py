"""A sum over processes in one kernel: each reads all terms where they are. Stands for `cross_device_reduce_1stage` of
vllm/csrc/custom_all_reduce.cuh (v0.22.1).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# What a program adds up, whatever the dtype is: so a program of one sum has the same place as that of any other.
BYTES_A_PROGRAM = 4096
# What a thread reads at once.
BYTES_AT_ONCE = 16
# A row of a norm has a place where programs of sums have none: its numbers, whatever its width and its dtype are, and
# behind them so many ranks of an adapter's h, in float32.
BYTES_OF_X = tl.constexpr(16384)
MOST_RANKS = 32
BYTES_A_ROW = BYTES_OF_X.value + 4 * MOST_RANKS
# So many rows have room.
ROWS = 128
# So often a program looks for another rank before it asks the host whether that has ended. A look takes 0.2 us, what
# the host answers to all programs of a launch up to 1 ms. While these ask, the other rank waits for them; it must not
# begin to ask, too, or ranks keep each other late for good.
LOOKS = 1 << 18
# A rank that has ended has come to so many sums that are yet to be.
NEVER = tl.constexpr(1 << 30)


class Meetings(NamedTuple):
    """Where a rank meets the others, one meeting after another.

    rooms   (ranks,) int64, where each rank has 2 x `half` bytes for its terms, at multiples of 16
    flags   (ranks,) int64, where each has (programs, ranks) int32: to how many meetings the others have come
    counts  (programs,) int32, to how many this rank has come, alike on all
    stop    (1,) int32 in the host's memory: once it is not 0, nobody waits any more, and sums are wrong
    half    bytes
    rank    which one this is
    """

    rooms: torch.Tensor
    flags: torch.Tensor
    counts: torch.Tensor
    stop: torch.Tensor
    half: int
    rank: int


@triton.jit
def room_of(rooms_ptr, rank, dtype: tl.constexpr):
    """Where a rank's terms of a dtype are; aligned, so threads read 16 bytes at once."""
    return tl.multiple_of(tl.load(rooms_ptr + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _wait_for_one(flag_ptr, count, stop_ptr, LOOKS: tl.constexpr):
    """Until a flag says `count`. Who has once found that it will not puts the flag where no sum waits for it again."""
    looks = 0
    # An atomic gives all threads of the program the same: none goes on alone.
    while count - tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") > 0:
        looks += 1
        if looks % LOOKS == 0:  # noqa: SIM102  an "and" would compute both
            if tl.load(stop_ptr, volatile=True) != 0:
                tl.store(flag_ptr, count + NEVER)


@triton.jit
def bring(x, place, inside, rooms_ptr, RANK: tl.constexpr):
    """Put what this rank brings to its next meeting into its room."""
    tl.store(room_of(rooms_ptr, RANK, x.dtype) + place, x, mask=inside)


@triton.jit
def come(count, flags_ptr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Say to all ranks that this program has come to its meeting of that number, with what it has brought.

    That lies in its rank's room, in the half `count & 1`. A place in a room is of one program, in all kernels that meet
    so: they count together. Who comes to a meeting has read what the one before brought; so nobody can still read the
    half of the meeting before that, which is written now. Counts wrap around.

    What is loaded before is waited for here: what the meeting does not need comes between this and `wait`.
    """
    pid = tl.program_id(0)
    tl.debug_barrier()  # all of the program's part, before its flags
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            theirs = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + pid * SIZE + RANK, count, sem="release", scope="sys")


@triton.jit
def wait(
    count, flags_ptr, counts_ptr, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """Until the programs of this one's number on all other ranks have come to that meeting."""
    pid = tl.program_id(0)
    mine = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + pid * SIZE
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            _wait_for_one(mine + rank, count, stop_ptr, LOOKS)
    tl.debug_barrier()  # all flags, before any other's part
    tl.store(counts_ptr + pid, count)


@triton.jit
def sum_of(place, inside, rooms_ptr, SIZE: tl.constexpr, dtype: tl.constexpr):
    """What all ranks have brought to those places, in the order of ranks, in float32; 0 outside. They have met."""
    total = tl.zeros(place.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        terms = room_of(rooms_ptr, rank, dtype) + place
        total += tl.load(terms, mask=inside, other=0.0, volatile=True).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["pieces"])
def _peer_sum_kernel(
    x_ptr, y_ptr, rooms_ptr, flags_ptr, counts_ptr, stop_ptr, pieces, half,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """y = the sum of all ranks' x, in the order of ranks."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < pieces * PIECE
    x = tl.load(x_ptr + place, mask=inside)
    count = tl.load(counts_ptr + tl.program_id(0)) + 1
    there = (count & 1) * half + place
    bring(x, there, inside, rooms_ptr, RANK)
    come(count, flags_ptr, RANK, SIZE)
    wait(count, flags_ptr, counts_ptr, stop_ptr, RANK, SIZE, LOOKS)
    tl.store(y_ptr + place, sum_of(there, inside, rooms_ptr, SIZE, DTYPE), mask=inside)


def programs_of(nbytes: int) -> int:
    return -(-nbytes // BYTES_A_PROGRAM)


def peer_sum(x: torch.Tensor, meetings: Meetings, looks: int = LOOKS) -> torch.Tensor:
    """The sum of every rank's x. All ranks must call it with as many elements; all get the same bits.

    x       contiguous, a multiple of 16 bytes, at most `half`
    looks   after so many at a flag comes one at `stop`
    """
    y = torch.empty_like(x)
    rooms, flags, counts, stop, half, rank = meetings
    _peer_sum_kernel[(programs_of(x.nbytes),)](
        x, y, rooms, flags, counts, stop, x.nbytes // BYTES_AT_ONCE, half // x.itemsize,
        RANK=rank, SIZE=len(rooms), BLOCK=BYTES_A_PROGRAM // x.itemsize, PIECE=BYTES_AT_ONCE // x.itemsize,
        LOOKS=looks,
    )  # fmt: skip
    return y
