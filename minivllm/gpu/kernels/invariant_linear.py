"""A linear whose rows have the same bits in every batch. Stands for vllm/model_executor/layers/batch_invariant.py."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class LinearTiles(NamedTuple):
    """A program computes block_m rows of block_n columns, block_k of K at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Chosen for an H100: most rows, most columns, and what is fastest up to there. Fewer than 64 rows in a block would be
# another instruction, which might sum in another order.
FASTEST = (
    (64, 5000, LinearTiles(64, 32, 128, 4, 6)),
    (64, 2**31, LinearTiles(64, 32, 128, 4, 4)),
    (128, 5000, LinearTiles(64, 64, 128, 4, 4)),
    (128, 8192, LinearTiles(64, 128, 64, 4, 5)),
    (512, 5000, LinearTiles(64, 128, 64, 4, 5)),
    (512, 8192, LinearTiles(128, 64, 64, 4, 4)),
    (512, 2**31, LinearTiles(128, 128, 64, 8, 4)),
    (2**31, 2**31, LinearTiles(256, 128, 64, 8, 3)),
)
GROUP_M = 8


@triton.jit
def _place(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Block of rows and block of columns, so that programs side by side share what they read."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = program // (GROUP_M * blocks_n)
    height = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * blocks_n)
    return group * GROUP_M + within % height, within // height


@triton.jit(do_not_specialize=["M"])
def _invariant_linear_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr,
    M, N, K, x_row, w_row, y_row,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Sums over K run from its beginning to its end in one accumulator, whatever M is: no split, no atomics."""
    block_m, block_n = _place(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (block_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x_block = x_ptr + rows[:, None] * x_row + inner[None, :]
    w_block = w_ptr + columns[None, :] * w_row + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = inner < K - k
        x = tl.load(x_block + k, mask=(rows < M)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_block + k, mask=(columns < N)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    is_y = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y_ptr + rows[:, None] * y_row + columns[None, :], acc, mask=is_y)


def linear_tiles(rows: int, columns: int) -> LinearTiles:
    """rows: M, columns: N. The order of a sum is the same in all of them, so each number of rows has the fastest."""
    return next(tiles for most, widest, tiles in FASTEST if rows <= most and columns <= widest)


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tiles: LinearTiles | None = None
) -> torch.Tensor:
    """x · weightᵀ + bias, as `F.linear`. A row of the result depends on its row of x alone, bit for bit.

    A library chooses its kernel, and so the order of its sums, by the number of rows.

    x       (..., K), as M rows, which may be further apart than K
    weight  (N, K), K contiguous    bias: (N,) or None
    tiles   None = by M and N

    Returns (..., N) of x's dtype; products are summed in float32 and rounded once.
    """
    shape = *x.shape[:-1], len(weight)
    x = x.reshape(-1, x.shape[-1])
    (m, k), n = x.shape, len(weight)
    tiles = tiles or linear_tiles(m, n)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if x.dtype == torch.float32:  # twice the bytes in each tile
        tiles = tiles._replace(block_m=min(tiles.block_m, 128), block_n=min(tiles.block_n, 64), block_k=32)
    grid = (triton.cdiv(m, tiles.block_m) * triton.cdiv(n, tiles.block_n),)
    _invariant_linear_kernel[grid](
        x, weight, bias, y,
        m, n, k, x.stride(0), weight.stride(0), y.stride(0),
        HAS_BIAS=bias is not None,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=GROUP_M,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return y.view(shape)
