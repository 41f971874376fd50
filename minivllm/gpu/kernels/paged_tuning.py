"""Tile sizes of the paged kernels, by shape; chosen by measurement on an H100.

Beside vllm/lora/ops/triton_ops/utils.py (v0.22.1).
"""

from typing import NamedTuple

import triton

from minivllm.gpu.sgmv.tuning import FEW_TOKENS


class PagedShrinkTiles(NamedTuple):
    """A program takes `block_r` ranks of one slice, block_k columns of x at a time; `splits` share a row."""

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


class AdaptedNormTiles(NamedTuple):
    """block_r ranks of a whole row at a time."""

    block_r: int
    num_warps: int


class AdaptedRotaryTiles(NamedTuple):
    """A program takes `heads` of q, k or v, one after the other, of `rows` rows of a tile; block_r ranks at a time."""

    heads: int
    rows: int
    block_r: int
    num_warps: int


# No fewer ranks in one product than a tensor core takes.
LEAST_BLOCK_RANKS = 16
# Up to here a prompt fills so few tiles that with two splits most multiprocessors have no program, and the others walk
# half of K. The product beside them is through before.
FEW_FULL_TILES = 1024


def paged_shrink_tiles(tokens: int, width: int, rank: int) -> PagedShrinkTiles:
    """tokens: T, width: K, rank: R

    The number of slots is not asked: what it costs must not depend on how many there could be. Of the tokens only
    in which of three classes they are, so that a warm-up can compile every variant there is.
    """
    most = max(1, width // 256)
    if tokens > FEW_TOKENS:
        # Most adapters are shorter than the longest: small blocks of ranks, of which those not live end at once.
        splits = min(8 if tokens <= FEW_FULL_TILES else 2, most)
        return PagedShrinkTiles(min(32, block_ranks(rank)), 64, splits, num_warps=4, num_stages=4)
    block_r = block_ranks(rank)
    # Of few ranks a program has little to do, and walks K alone. Of many, planes are as much to write as A is to read.
    splits = min(8 if block_r <= 32 else 4, most)
    return PagedShrinkTiles(block_r, 128, splits, num_warps=4, num_stages=3)


def paged_expand_tiles(tokens: int, rank: int, widest: int) -> PagedExpandTiles:
    """tokens: T, rank: R, widest: the largest N_i"""
    block_r = block_ranks(rank)
    if tokens > FEW_TOKENS:
        return PagedExpandTiles(128, block_r, num_warps=4)
    if block_r > 32:
        return PagedExpandTiles(64, block_r, num_warps=4)
    return PagedExpandTiles(256 if widest >= 4096 else 128, block_r, num_warps=4)


def adapted_silu_tiles(tokens: int, rank: int) -> PagedExpandTiles:
    """tokens: T, rank: R"""
    block_r = block_ranks(rank)
    if tokens <= FEW_TOKENS:
        return PagedExpandTiles(128, block_r, num_warps=4)
    return PagedExpandTiles(64, block_r, num_warps=8 if block_r == LEAST_BLOCK_RANKS else 4)


def adapted_rotary_tiles(tokens: int, rank: int) -> AdaptedRotaryTiles:
    """tokens: T, rank: R"""
    block_r = block_ranks(rank)
    if tokens <= FEW_TOKENS:
        return AdaptedRotaryTiles(1, 16, block_r, num_warps=4)
    # Of few ranks B is soon read again. Of many, more rows share it.
    rows, warps = (16, 4) if block_r == LEAST_BLOCK_RANKS else (64, 8)
    return AdaptedRotaryTiles(4, rows, block_r, warps)


# A norm of rows has one program each. Up to here all run at once, and none reads so much of B that it is later than an
# expand.
MOST_NORM_TOKENS, MOST_NORM_RANK = 128, 32
# Of B, in the registers of one program: 16 warps hold twice as much.
NORM_BYTES = 128 * 1024


def norm_adds(tokens: int, rank: int) -> bool:
    """Whether a norm adds what adapters add; else an expand before it is faster.   tokens: T, rank: R"""
    return tokens <= MOST_NORM_TOKENS and rank <= MOST_NORM_RANK


def adapted_norm_tiles(width: int, rank: int, itemsize: int) -> AdaptedNormTiles:
    """width: H, rank: R"""
    row = triton.next_power_of_2(width)
    block_r = min(16, triton.next_power_of_2(rank), max(1, NORM_BYTES // (row * itemsize)))
    # A thread has 8 columns: 16 bytes of each rank.
    return AdaptedNormTiles(block_r, min(max(row // 256, 1), 16))


def block_ranks(rank: int) -> int:
    """Ranks in one product."""
    return min(64, max(LEAST_BLOCK_RANKS, triton.next_power_of_2(rank)))
