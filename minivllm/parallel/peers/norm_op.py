"""A sum over processes, the residual's and the norm of that in one kernel. vLLM has its compiler put them together:
`AllReduceFusionPass` of vllm/compilation/passes/fusion/allreduce_rms_fusion.py (v0.22.1), by FlashInfer's kernels.
"""

import torch
import triton
import triton.language as tl

from minivllm.parallel.peers.sum_op import LOOKS, meet, sum_of

# The room of a row, whatever its width and its dtype are: so a program's place is the same in all norms.
BYTES_A_ROW = 16384
# So many rows have room.
ROWS = 128


@triton.jit
def add_and_norm(x, residual, residual_ptrs, weight, y_ptrs, inside, eps, H: tl.constexpr):
    """residual += x, and y = its norm, rounded where `fused_add_rms_norm` rounds.   x: (BLOCK,) float32"""
    kept = (x + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptrs, kept, mask=inside)
    stream = kept.to(tl.float32)
    y = stream * tl.rsqrt(tl.sum(stream * stream) / H + eps) * weight
    tl.store(y_ptrs, y, mask=inside)


@triton.jit
def _peer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, eps, residual_row,
    rooms_ptr, flags_ptr, counts_ptr, stop_ptr, half,
    RANK: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
    LOOKS: tl.constexpr,
):  # fmt: skip
    """residual[row] += the sum of all ranks' x[row], in the order of ranks; y[row] = its norm. A program has a row.

    A program has the flags and the count of a sum's of its number, but its place is in rooms where sums have none. In
    the sums' it would be that of programs which have met more often or less often than this one. Then this one could
    write the half that another rank's program of another number still reads: it has never waited for that one.
    So norms may take turns with sums and gathers: a count goes on through all, and a half that norms come to was last
    used two meetings ago, or earlier, by the same program.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < H
    x = tl.load(x_ptr + row * H + column, mask=inside, other=0.0)
    # Read while the others are waited for.
    residual_ptrs = residual_ptr + row.to(tl.int64) * residual_row + column
    residual = tl.load(residual_ptrs, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    place = row * ROOM + column
    begin = meet(x, place, inside, rooms_ptr, flags_ptr, counts_ptr, stop_ptr, half, RANK, SIZE, LOOKS)
    # From here on as a sum and then a norm: rounded where these round.
    total = sum_of(x, begin + place, inside, rooms_ptr, SIZE).to(x.dtype).to(tl.float32)
    add_and_norm(total, residual, residual_ptrs, weight, y_ptr + row * H + column, inside, eps, H)


def peer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
    rooms: torch.Tensor, flags: torch.Tensor, counts: torch.Tensor, stop: torch.Tensor, half: int,
    rank: int, looks: int = LOOKS,
) -> torch.Tensor:  # fmt: skip
    """residual += the sum of every rank's x, in place; the RMS norm of that. All ranks get the same bits.

    They are those of `peer_sum`, and then `fused_add_rms_norm`. All ranks must call it with the same shape.

    x         (T, H), contiguous; rows are multiples of 16 bytes, at most BYTES_A_ROW
    residual  (T, H), row stride of any width
    weight    (H,) -> (T, H) contiguous
    rooms     (ranks,) int64, where each rank has 2 x `half` bytes for norms alone, at multiples of 16
    half      BYTES_A_ROW for each of as many rows as there may be

    Flags, counts and the rest are as for `peer_sum`, with which it shares them: as many programs as rows, or more.
    """
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _peer_norm_kernel[(len(x),)](
        x, residual, weight, y, eps, residual.stride(0), rooms, flags, counts, stop, half // x.itemsize,
        RANK=rank, SIZE=len(rooms), H=x.shape[1], BLOCK=block, ROOM=BYTES_A_ROW // x.itemsize, LOOKS=looks,
        num_warps=warps_of(block),
    )  # fmt: skip
    return y


def warps_of(block: int) -> int:
    """As many as `fused_add_rms_norm` has: squares are added up in an order that depends on it."""
    return min(max(block // 512, 1), 16)
