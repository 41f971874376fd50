"""The likeliest token of each row. Beside `torch.argmax`, by which vllm/v1/sample/sampler.py (v0.22.1) is greedy."""

import torch
import triton
import triton.language as tl

# Columns of a program: 32 rows of 32,000 are 1,024 programs.
BLOCK = 1024


@triton.jit
def _largest(x):
    """The largest number, and its place: of equal ones the first. NaN counts as infinity.   x: (n,)"""
    return tl.max(tl.where(x != x, float("inf"), x), axis=0, return_indices=True)


@triton.jit
def _keep_kernel(
    logits_ptr, kept_ptr, best_ptr, columns_ptr, logits_row, kept_row, width, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    logits = tl.load(logits_ptr + row * logits_row + column, mask=inside, other=float("-inf"))
    tl.store(kept_ptr + row * kept_row + column, logits, mask=inside)
    best, place = _largest(logits)
    of_block = row * tl.num_programs(1) + block
    tl.store(best_ptr + of_block, best)
    tl.store(columns_ptr + of_block, block * BLOCK + place)


@triton.jit
def _likeliest_kernel(best_ptr, columns_ptr, tokens_ptr, blocks, BLOCKS: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    best = tl.load(best_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    _, place = _largest(best)
    tl.store(tokens_ptr + row, tl.load(columns_ptr + row * blocks + place))


def keep_likeliest(logits: torch.Tensor, kept: torch.Tensor, tokens: torch.Tensor) -> None:
    """kept = logits, and tokens = the column of the largest in each row: of equal ones the first.

    logits, kept  (P, V), row strides of any width; NaN counts as infinity    tokens  (P,) int64
    """
    rows, width = logits.shape
    blocks = triton.cdiv(width, BLOCK)
    best = logits.new_empty(rows, blocks)
    columns = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _keep_kernel[rows, blocks](
        logits, kept, best, columns, logits.stride(0), kept.stride(0), width, BLOCK=BLOCK
    )
    _likeliest_kernel[(rows,)](best, columns, tokens, blocks, BLOCKS=triton.next_power_of_2(blocks))
