"""All rows of a batch, those without an adapter too, for a kernel that has no other launch to leave these to.

Beside vllm/lora/ops/triton_ops/lora_kernel_metadata.py (v0.22.1), whose rows all have adapters.
"""

import triton
import triton.language as tl

from minivllm.gpu.sgmv.lora_kernel_metadata import TileList


@triton.jit
def rows_of_tile(
    tiles_ptr, capacity, tile, tile_count, tokens, BLOCK_ROWS: tl.constexpr, BLOCK_TILES: tl.constexpr
):
    """A tile's adapter, where its rows begin, and how many it has: none or fewer where there is no tile.

    tiles_ptr     (3, capacity) adapter, first row, rows
    tile          from `tile_count` on it is a block of base rows, which lie behind all others
    BLOCK_TILES   no fewer than `tile_count`
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


def programs_of_rows(tokens: int, tiles: TileList) -> int:
    """Tiles of T rows, and the most blocks of base rows that there can be."""
    return tiles.count + triton.cdiv(tokens, tiles.block_rows)
