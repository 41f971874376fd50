"""As `peer_norm_op`, for few rows: others' terms are not fetched, but brought.

Beside `AllReduceFusionPass` of vllm/compilation/passes/fusion/allreduce_rms_fusion.py (v0.22.1).
"""

import torch
import triton
import triton.language as tl

from minivllm.parallel.peers.norm_op import add_and_norm, warps_of
from minivllm.parallel.peers.sum_op import LOOKS
from minivllm.parallel.peers.words_op import Words, numbers_of, push, receive, room_of

# Half of a word is no data. With more rows, or more bytes for all others together, to read over the link is faster:
# on two H200 64 rows of 8 KiB take 11.9 us either way, 128 rows 16.7 instead of 15.8.
MOST_ROWS = 64
MOST_BYTES = 1 << 19


def packs(x: torch.Tensor, size: int) -> bool:
    """Whether words bring so many rows sooner than a `peer_norm` reads them.   x: (T, H)"""
    return len(x) <= MOST_ROWS and x.nbytes * (size - 1) <= MOST_BYTES


@triton.jit
def _packed_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, eps, residual_row,
    rooms_ptr, counts_ptr, ended_ptr, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
    LOOKS: tl.constexpr,
):  # fmt: skip
    """residual[row] += the sum of all ranks' x[row], in the order of ranks; y[row] = its norm. A program has a row.

    NUMBERS  in a word
    """
    row = tl.program_id(0)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK // NUMBERS)
    inside, is_word = column < H, place < H // NUMBERS
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + row * (H // NUMBERS) + place, mask=is_word, other=0)
    count, ended = tl.load(counts_ptr + row) + 1, tl.load(ended_ptr + row)
    push(own, place, is_word, count, row, rooms_ptr, RANK, SIZE)
    # Read while the others' words are on their way.
    residual_ptrs = residual_ptr + row.to(tl.int64) * residual_row + column
    residual = tl.load(residual_ptrs, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += numbers_of(own, DTYPE).to(tl.float32)
        else:
            theirs = room_of(rooms_ptr, RANK, rank, count, row, SIZE) + place
            data = receive(theirs, is_word, count, ended, ended_ptr + row, stop_ptr, LOOKS)
            total += numbers_of(data, DTYPE).to(tl.float32)
    tl.store(counts_ptr + row, count)
    # From here on as a sum and then a norm: rounded where these round.
    total = total.to(DTYPE).to(tl.float32)
    add_and_norm(total, residual, residual_ptrs, weight, y_ptr + row * H + column, inside, eps, H)


def packed_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    words: Words,
    looks: int = LOOKS,
) -> torch.Tensor:
    """residual += the sum of every rank's x, in place; the RMS norm of that. All ranks get the same bits.

    They are those of `peer_sum`, and then `fused_add_rms_norm`. All ranks must call it with the same shape.

    x         (T, H), contiguous, T at most ROWS; rows are multiples of 4 bytes, at most 4 x WORDS
    residual  (T, H), row stride of any width
    weight    (H,) -> (T, H) contiguous
    looks     after so many at others' words comes one at `words.stop`
    """
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _packed_norm_kernel[(len(x),)](
        x, residual, weight, y, eps, residual.stride(0), *words[:4],
        RANK=words.rank, SIZE=len(words.rooms), H=x.shape[1], BLOCK=block, NUMBERS=4 // x.itemsize, LOOKS=looks,
        num_warps=warps_of(block),
    )  # fmt: skip
    return y
