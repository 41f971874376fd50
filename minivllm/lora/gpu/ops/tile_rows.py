"""Rows of a batch by slot and then base rows, for kernels that have all of them. Beside lora_kernel_metadata.py."""

import torch
import triton
import triton.language as tl

from minivllm.lora.ops.triton_ops.lora_kernel_metadata import TileList


@triton.jit
def rows_of_tile(
    tiles_ptr, capacity, tile, tile_count, tokens, BLOCK_ROWS: tl.constexpr, BLOCK_TILES: tl.constexpr
):
    """The adapter of a tile, the first place of its rows, and how many these are: none where there is no tile.

    tiles_ptr   (3, capacity) adapter, first row, rows
    tile        from `tile_count` on a block of base rows, which lie behind all others and have adapter 0
    """
    adapter, first, length = tl.zeros((), tl.int64), 0, 0
    if tile < tile_count:
        adapter = tl.load(tiles_ptr + tile).to(tl.int64)
        first = tl.load(tiles_ptr + capacity + tile)
        length = tl.where(adapter < 0, 0, tl.load(tiles_ptr + 2 * capacity + tile))
    else:
        each = tl.arange(0, BLOCK_TILES)
        is_tile = (each < tile_count) & (tl.load(tiles_ptr + each, mask=each < tile_count, other=-1) >= 0)
        lengths = tl.load(tiles_ptr + 2 * capacity + each, mask=is_tile, other=0)
        first = tl.sum(lengths) + (tile - tile_count) * BLOCK_ROWS
        length = tokens - first
    return adapter, first, length


def base_tile_count(rows: torch.Tensor, tiles: TileList) -> int:
    """The most blocks of base rows that there can be.   rows: (T, ...)"""
    return triton.cdiv(len(rows), tiles.block_rows)
