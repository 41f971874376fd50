"""Open exercise, phase 04: tiles of tokens of one slot. A is loaded once a tile, and of it what is live.

The host sorts tokens by slot; a tile is up to eight of them. Eight rows share one loading of A.
"""

import torch
import triton
import triton.language as tl

TILE = 8


def plan(
    slots: tuple[int, ...], ranks: tuple[int, ...], width: int, max_rank: int
) -> tuple[tuple, tuple, dict]:
    """A row of the table is a tile: its slot, its live rank, its tokens, -1 where there is none."""
    tiles = []
    for slot, rank in enumerate(ranks):
        tokens = [token for token, its in enumerate(slots) if its == slot]
        for start in range(0, len(tokens), TILE):
            part = tokens[start : start + TILE]
            tiles.append([slot, rank, *part, *[-1] * (TILE - len(part))])
    return (len(tiles),), (torch.tensor(tiles),), {"K": width, "R": max_rank, "TILE": TILE}


@triton.jit
def shrink_kernel(x_ptr, a_ptr, h_ptr, tiles_ptr, K: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr):
    """One program a tile."""
    tile = tiles_ptr + tl.program_id(0) * (TILE + 2)
    slot, rank = tl.load(tile), tl.load(tile + 1)
    tokens = tl.load(tile + 2 + tl.arange(0, TILE))
    columns, rows = tl.arange(0, K), tl.arange(0, R)
    is_row, is_live = (tokens >= 0)[:, None], (rows < rank)[:, None]
    x = tl.load(x_ptr + tokens[:, None] * K + columns[None, :], mask=is_row, other=0.0)  # (TILE, K)
    a = tl.load(
        a_ptr + slot * R * K + rows[:, None] * K + columns[None, :], mask=is_live, other=0.0
    )  # (R, K)
    h = tl.sum(x[:, None, :] * a[None, :, :], axis=2)  # (TILE, R)
    tl.store(h_ptr + tokens[:, None] * R + rows[None, :], h, mask=is_row & (rows < rank)[None, :])
