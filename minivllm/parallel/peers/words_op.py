"""Words in which ranks bring each other numbers: 4 bytes of data, and 4 that say of which meeting they are.

NCCL calls such words its protocol LL. A store of 8 bytes is seen whole or not at all. So nobody waits for a fence, nor
for a read over the link. Beside vllm/csrc/custom_all_reduce.cuh (v0.22.1), whose flags are apart.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minivllm.parallel.peers import norm_op

# So many rows have room, of so many words each. Behind these are some for what else a row brings: an adapter's h.
ROWS = tl.constexpr(norm_op.ROWS)
WORDS = tl.constexpr(norm_op.BYTES_A_ROW // 4)
MORE_WORDS = tl.constexpr(32)
BYTES_A_WORD = 8


class Words(NamedTuple):
    """What a rank needs to bring words, and to get others'.

    rooms    (ranks,) int64, where each rank has `bytes_of_rooms`, zeros at the start, at multiples of 16
    counts   (ROWS,) int32, at how many meetings each row was: alike on all ranks, zeros at the start
    ended    (ROWS,) int32, zeros at the start; not 0 = the row waits for nobody any more
    stop     (1,) int32 in the host's memory: once it is not 0, nobody waits any more, and numbers are wrong
    rank     which one this is
    """

    rooms: torch.Tensor
    counts: torch.Tensor
    ended: torch.Tensor
    stop: torch.Tensor
    rank: int


def bytes_of_rooms(size: int) -> int:
    """What each of so many ranks has for others' words."""
    return 2 * size * ROWS.value * (WORDS.value + MORE_WORDS.value) * BYTES_A_WORD


@triton.jit
def room_of(rooms_ptr, receiver, sender, count, row, SIZE: tl.constexpr):
    """Where a rank gets the first word of another's row, at a meeting of that count.

    Halves are used in turns. Who brings words to meeting n + 2 has got the receiver's of n + 1, which that sent once it
    had read those of n. So two are enough. A row counts for itself: rows that a meeting lacks count no further.
    """
    begin = (((count & 1) * SIZE + sender) * ROWS + row) * (WORDS + MORE_WORDS)
    return tl.multiple_of(tl.load(rooms_ptr + receiver).to(tl.pointer_type(tl.int64)) + begin, 16)


@triton.jit
def push(data, place, inside, count, row, rooms_ptr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Bring int32 data to all other ranks, each 4 bytes with the count."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            room = room_of(rooms_ptr, rank, RANK, count, row, SIZE)  # looked up while the data is on its way
            words = (count.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
            tl.store(room + place, words, mask=inside)


@triton.jit
def look(ptrs, inside, count):
    """The data of words as they are now, and where it is not of that meeting: 1."""
    words = tl.load(ptrs, mask=inside, other=count.to(tl.int64) << 32, volatile=True)
    return words.to(tl.int32), ((words >> 32).to(tl.int32) != count).to(tl.int32)


@triton.jit
def ask(looks, ended, ended_ptr, stop_ptr, LOOKS: tl.constexpr):
    """Whether a row waits for nobody any more. After every LOOKS looks the host is asked."""
    if looks % LOOKS == 0:
        tl.atomic_max(ended_ptr, tl.load(stop_ptr, volatile=True))
        # An atomic gives all threads of the program the same: none goes on alone.
        ended = tl.atomic_max(ended_ptr, 0)
    return ended


@triton.jit
def receive(ptrs, inside, count, ended, ended_ptr, stop_ptr, LOOKS: tl.constexpr):
    """The data that another rank brings there, once all has come. If ranks have ended, what is there.

    ended   what was at `ended_ptr` when the program began. Only programs of its row write that
    """
    data, is_missing = look(ptrs, inside, count)
    missing = tl.max(is_missing)  # over all threads of the program: all go on together
    looks = 0
    while (missing != 0) & (ended == 0):
        looks += 1
        ended = ask(looks, ended, ended_ptr, stop_ptr, LOOKS)
        data, is_missing = look(ptrs, inside, count)
        missing = tl.max(is_missing)
    return data


@triton.jit
def receive_both(
    ptrs, inside, more_ptrs, more_inside, count, ended, ended_ptr, stop_ptr, LOOKS: tl.constexpr
):  # fmt: skip
    """As `receive`, of few words more. Every warp sees all of these: it says so with what it sees of the others."""
    data, is_missing = look(ptrs, inside, count)
    more, more_missing = look(more_ptrs, more_inside, count)
    missing = tl.max(is_missing | tl.max(more_missing))
    looks = 0
    while (missing != 0) & (ended == 0):
        looks += 1
        ended = ask(looks, ended, ended_ptr, stop_ptr, LOOKS)
        data, is_missing = look(ptrs, inside, count)
        more, more_missing = look(more_ptrs, more_inside, count)
        missing = tl.max(is_missing | tl.max(more_missing))
    return data, more


@triton.jit
def numbers_of(data, DTYPE: tl.constexpr):
    """What int32 data says: one number of 4 bytes, or two of 2.   (n,) -> (n,) or (2n,)"""
    if DTYPE.primitive_bitwidth == 32:
        numbers = data.to(DTYPE, bitcast=True)
    else:
        low, high = (data & 0xFFFF).to(tl.uint16), ((data >> 16) & 0xFFFF).to(tl.uint16)
        numbers = tl.interleave(low, high).to(DTYPE, bitcast=True)
    return numbers
