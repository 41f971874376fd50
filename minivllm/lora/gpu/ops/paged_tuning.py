"""Tile sizes of the paged kernels, by shape; chosen by measurement on an H100.

Beside vllm/lora/ops/triton_ops/utils.py (v0.22.1).
"""

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


# Shares of K, and so planes that every program of the expand adds up: of few tokens, and of prompts. On an H100 twice
# as many cost a decode step 5 to 10 us a layer. With half as many the base product ends before the shrink.
FEW_SPLITS, PROMPT_SPLITS = 4, 2


def paged_shrink_tiles(tokens: int, width: int, rank: int, slices: int) -> PagedShrinkTiles:
    """tokens: T, width: K, rank: R, slices: n

    The number of slots is not asked: what it costs must not depend on how many there could be. Of the tokens only
    whether they are few, so that a warm-up can compile every variant there is.
    """
    wanted = FEW_SPLITS if tokens <= FEW_TOKENS else PROMPT_SPLITS
    splits = max(1, min(wanted, width // 256))
    block_r = block_ranks(rank)
    if tokens <= FEW_TOKENS:
        return PagedShrinkTiles(1, block_r, 128, splits, num_warps=4, num_stages=3)
    if rank > 64:
        # Most adapters are shorter than the longest: small blocks of ranks, of which those not live end at once.
        return PagedShrinkTiles(1, 32, 64, splits, num_warps=4, num_stages=3)
    # Prompts: x is read once for all slices.
    return PagedShrinkTiles(triton.next_power_of_2(slices), block_r, 64, splits, num_warps=8, num_stages=3)


def paged_expand_tiles(tokens: int, rank: int, widest: int) -> PagedExpandTiles:
    """tokens: T, rank: R, widest: the largest N_i"""
    block_r = block_ranks(rank)
    wide = tokens <= FEW_TOKENS and block_r <= 32 and widest >= 4096
    return PagedExpandTiles(256 if wide else 128, block_r, num_warps=4)


def block_ranks(rank: int) -> int:
    """Ranks in one product: no fewer than a tensor core takes."""
    return min(64, max(16, triton.next_power_of_2(rank)))
