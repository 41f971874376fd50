"""A sum over processes in one kernel: each reads all terms where they are. Stands for `cross_device_reduce_1stage` of
vllm/csrc/custom_all_reduce.cuh (v0.22.1).
"""

import torch
import triton
import triton.language as tl

# What a program adds up, whatever the dtype is: so a program of one sum has the same place as that of any other.
BYTES_A_PROGRAM = 2048
# What a thread reads at once.
BYTES_AT_ONCE = 16


@triton.jit
def _look(flag_ptr):
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def _room(rooms_ptr, rank, x_ptr):
    """Where a rank's terms are; aligned, so threads read 16 bytes at once."""
    return tl.multiple_of(tl.load(rooms_ptr + rank).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["pieces"])
def _peer_sum_kernel(
    x_ptr, y_ptr, rooms_ptr, flags_ptr, sums_ptr, stop_ptr, pieces, half,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """y = the sum of all ranks' x, in the order of ranks. A program meets those of its number on other ranks, once.

    A room has two halves for terms, used in turns. Who begins a sum has read the one before; so nobody can still read
    the half of the sum before that, which it writes now. Counts wrap around.
    """
    pid = tl.program_id(0)
    place = pid * BLOCK + tl.arange(0, BLOCK)
    inside = place < pieces * PIECE
    count = tl.load(sums_ptr + pid) + 1
    begin = (count & 1) * half
    tl.store(_room(rooms_ptr, RANK, x_ptr) + begin + place, tl.load(x_ptr + place, mask=inside), mask=inside)
    tl.debug_barrier()  # all of the program's term, before its flags
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            theirs = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + pid * SIZE + RANK, count, sem="release", scope="sys")
    mine = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + pid * SIZE
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            looks, stop = 0, 0
            while (count - _look(mine + rank) > 0) & (stop == 0):
                looks += 1
                if looks % LOOKS == 0:  # it is on the host, far away
                    stop = tl.load(stop_ptr, volatile=True)
    tl.debug_barrier()  # all flags, before any term
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        terms = _room(rooms_ptr, rank, x_ptr) + begin + place
        total += tl.load(terms, mask=inside, other=0.0, volatile=True).to(tl.float32)
    tl.store(y_ptr + place, total, mask=inside)
    tl.debug_barrier()
    tl.store(sums_ptr + pid, count)


def programs_of(nbytes: int) -> int:
    return -(-nbytes // BYTES_A_PROGRAM)


def peer_sum(
    x: torch.Tensor, rooms: torch.Tensor, flags: torch.Tensor, sums: torch.Tensor, stop: torch.Tensor, half: int,
    rank: int, looks: int = 1024,
) -> torch.Tensor:  # fmt: skip
    """The sum of every rank's x. All ranks must call it with as many elements; all get the same bits.

    x       contiguous, a multiple of 16 bytes, at most `half`
    rooms   (ranks,) int64, where each rank has 2 x `half` bytes for its terms, at multiples of 16
    flags   (ranks,) int64, where each has (programs, ranks) int32: how many sums the others have begun
    sums    (programs,) int32, how many sums this rank has had, alike on all
    stop    (1,) int32 in the host's memory: once it is not 0, nobody waits any more, and sums are wrong
    looks   after so many at a flag comes one at `stop`
    """
    y = torch.empty_like(x)
    _peer_sum_kernel[(programs_of(x.nbytes),)](
        x, y, rooms, flags, sums, stop, x.nbytes // BYTES_AT_ONCE, half // x.itemsize,
        RANK=rank, SIZE=len(rooms), BLOCK=BYTES_A_PROGRAM // x.itemsize, PIECE=BYTES_AT_ONCE // x.itemsize,
        LOOKS=looks,
    )  # fmt: skip
    return y
