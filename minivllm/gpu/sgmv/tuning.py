"""Tile sizes of the LoRA kernels, by shape. Stands for vllm/lora/ops/triton_ops/utils.py (v0.22.1)."""

import functools
from typing import NamedTuple

import torch
import triton

# An H100 has 132 multiprocessors; a few programs on each keep its memory busy.
TARGET_PROGRAMS = 512
# Up to here products are bound by the bytes of their weights, beyond by arithmetic.
FEW_TOKENS = 512


class ShrinkTiles(NamedTuple):
    """block_k columns of x at a time; `splits` programs share a row of x, each leaves a plane of partial sums."""

    block_k: int
    splits: int
    num_warps: int
    num_stages: int


class ExpandTiles(NamedTuple):
    """block_n columns of y at a time."""

    block_n: int
    num_warps: int


def block_rows(tokens: int) -> int:
    """Rows of a tile. Few rows an adapter: as few as a tensor core takes; many: enough to reuse A and B."""
    return 16 if tokens <= FEW_TOKENS else 64


def shrink_tiles(tokens: int, width: int, rank: int, tiles: int) -> ShrinkTiles:
    """tokens: T, width: K, tiles: tiles to launch"""
    block_k = 128 if rank <= 64 else 64
    # A split with no columns left would only write zeros.
    splits = max(1, min(8, TARGET_PROGRAMS // tiles, triton.cdiv(width, 2 * block_k)))
    return ShrinkTiles(block_k, splits, num_warps=4, num_stages=3)


def expand_tiles(tokens: int, rank: int, widest: int) -> ExpandTiles:
    """tokens: T, widest: the largest N_i"""
    if rank > 64:
        return ExpandTiles(64, num_warps=4)
    # A program that finds out whose rows it has, only to add few columns to few rows, has hardly begun.
    return ExpandTiles(256 if tokens <= 16 and widest > 8192 else 128, num_warps=4)


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the one it waits for has ended: on Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
