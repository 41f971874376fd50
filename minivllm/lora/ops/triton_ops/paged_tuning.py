"""Tile sizes of the paged kernels, by shape; chosen by measurement on an H100."""

from typing import NamedTuple

import triton

from minivllm.lora.ops.triton_ops.tuning import FEW_TOKENS


class PagedShrinkTiles(NamedTuple):
    """A program takes `block_r` ranks of `slices` slices, block_k columns of x at a time; `splits` share a row."""

    slices: int
    block_r: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


class PagedExpandTiles(NamedTuple):
    """block_n columns of y, block_r ranks at a time."""

    block_n: int
    block_r: int
    num_warps: int


def paged_shrink_tiles(tokens: int, width: int, rank: int, slices: int) -> PagedShrinkTiles:
    """tokens: T, width: K, rank: R, slices: n

    The number of slots is not asked: what it costs must not depend on how many there could be.
    """
    block_r = min(64, max(16, triton.next_power_of_2(rank)))
    if tokens <= FEW_TOKENS:
        wanted = 16 if tokens <= 64 else 8 if tokens <= 256 else 4
        splits = max(1, min(wanted, width // 256))
        return PagedShrinkTiles(1, block_r, 128, splits, num_warps=4, num_stages=3)
    # Prompts: x is read once for all slices, as long as the sums have room in registers.
    together = triton.next_power_of_2(slices)
    together = together if together * block_r <= 128 and rank <= block_r else 1
    splits = max(1, min(4, 512 // triton.cdiv(tokens, 64), width // 256))
    return PagedShrinkTiles(together, block_r, 64, splits, num_warps=4, num_stages=3)


def paged_expand_tiles(tokens: int, rank: int, widest: int) -> PagedExpandTiles:
    """tokens: T, rank: R, widest: the largest N_i"""
    block_r = min(64, max(16, triton.next_power_of_2(rank)))
    return PagedExpandTiles(256 if tokens <= 16 and widest > 8192 else 128, block_r, num_warps=4)
