"""Tile sizes of the paged kernels, by shape; chosen by measurement on an H100.

Beside vllm/lora/ops/triton_ops/utils.py (v0.22.1).
"""

from typing import NamedTuple

import triton

from minivllm.lora.ops.triton_ops.tuning import FEW_TOKENS


class PagedShrinkTiles(NamedTuple):
    """A program takes `block_r` ranks of one slice, block_k columns of x at a time; `splits` share a row."""

    block_r: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


class PagedExpandTiles(NamedTuple):
    """block_n columns of y, block_r ranks at a time. A program takes as many blocks as leave `programs` of them."""

    block_n: int
    block_r: int
    num_warps: int
    programs: int

    def group(self, tiles: int, widths: tuple[int, ...]) -> int:
        """Blocks of columns that one program takes."""
        blocks = sum(triton.cdiv(width, self.block_n) for width in widths)
        return min(8, max(1, tiles * blocks // self.programs))


# No fewer ranks in one product than a tensor core takes.
LEAST_BLOCK_RANKS = 16
# Shares of K: of few tokens, and of prompts. The number of slots is not asked: what it costs must not depend on how
# many there could be. Of the tokens only whether they are few, so that a warm-up can compile every variant there is.
FEW_SPLITS, PROMPT_SPLITS = 8, 2


def paged_shrink_tiles(tokens: int, width: int, rank: int) -> PagedShrinkTiles:
    """tokens: T, width: K, rank: R"""
    few = tokens <= FEW_TOKENS
    splits = max(1, min(FEW_SPLITS if few else PROMPT_SPLITS, width // 256))
    if few:
        return PagedShrinkTiles(block_ranks(rank), 128, splits, num_warps=4, num_stages=3)
    # Most adapters are shorter than the longest: small blocks of ranks, of which those not live end at once.
    return PagedShrinkTiles(min(32, block_ranks(rank)), 64, splits, num_warps=4, num_stages=4)


def paged_expand_tiles(tokens: int, rank: int, widest: int) -> PagedExpandTiles:
    """tokens: T, rank: R, widest: the largest N_i"""
    block_r = block_ranks(rank)
    few = tokens <= FEW_TOKENS
    wide = few and block_r <= 32 and widest >= 4096
    return PagedExpandTiles(256 if wide else 128, block_r, num_warps=4, programs=1024 if few else 1 << 30)


def paged_silu_tiles(tokens: int, rank: int) -> PagedExpandTiles:
    """tokens: T, rank: R"""
    block_r = block_ranks(rank)
    return PagedExpandTiles(64 if block_r <= 16 else 128, block_r, num_warps=4, programs=1 << 30)


def block_ranks(rank: int) -> int:
    """Ranks in one product."""
    return min(64, max(LEAST_BLOCK_RANKS, triton.next_power_of_2(rank)))
