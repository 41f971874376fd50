"""Open exercise, phase 04: one program a slot, so that each A is loaded once, whoever needs it.

As few programs as slots leave a GPU idle: with few bytes alone a kernel is not quick. Tables are 32 bits wide, and hold
tokens without padding.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4


def plan(
    slots: tuple[int, ...], ranks: tuple[int, ...], width: int, max_rank: int
) -> tuple[tuple, tuple, dict]:
    """Two tables: of each slot its live rank, where its tokens start and where they end; and tokens by slot."""
    table, order = [], []
    for slot, rank in enumerate(ranks):
        start = len(order)
        order += [token for token, its in enumerate(slots) if its == slot]
        table.append([rank, start, len(order)])
    tables = (torch.tensor(table, dtype=torch.int32), torch.tensor(order, dtype=torch.int32))
    return (len(ranks),), tables, {"K": width, "R": max_rank, "BLOCK": BLOCK}


@triton.jit
def shrink_kernel(
    x_ptr, a_ptr, h_ptr, table_ptr, order_ptr, K: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a slot, a few of its tokens at a time."""
    slot = tl.program_id(0)
    rank, start = tl.load(table_ptr + 3 * slot), tl.load(table_ptr + 3 * slot + 1)
    end = tl.load(table_ptr + 3 * slot + 2)
    columns, rows = tl.arange(0, K), tl.arange(0, R)
    is_live = rows < rank
    places = a_ptr + slot * R * K + rows[:, None] * K + columns[None, :]
    a = tl.load(places, mask=is_live[:, None], other=0.0)  # (R, K)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        is_row = place < end
        tokens = tl.load(order_ptr + place, mask=is_row, other=0)
        x = tl.load(
            x_ptr + tokens[:, None] * K + columns[None, :], mask=is_row[:, None], other=0.0
        )  # (BLOCK, K)
        h = tl.sum(x[:, None, :] * a[None, :, :], axis=2)  # (BLOCK, R)
        tl.store(h_ptr + tokens[:, None] * R + rows[None, :], h, mask=is_row[:, None] & is_live[None, :])
