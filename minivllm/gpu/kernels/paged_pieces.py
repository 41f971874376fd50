"""Where the A's and B's of one layer lie in a pool of pages, and how kernels read them there.

Beside vllm/lora/ops/triton_ops/utils.py (v0.22.1), whose slots are of one size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class PagedPieces(NamedTuple):
    """One layer's n pairs of A and B in the pages of every slot. A page holds p ranks of them, p being `page_ranks`.

    pool     (pages * page_stride,) the pages' elements
    table    (S, G) int32: the page of a slot's ranks 0..p-1, p..2p-1 and so on. Past its last it may hold anything
    ranks    (n, S) int32 live rank of each slice and slot
    rank     R, the largest
    experts  E, 1 but for experts; adapter s * E + e is expert e of slot s
    a, b     of each slice, in elements: where its A (E, p, K_i) and its transposed B (E, p, N_i) begin in a page
    widths   K_i      heights  N_i
    """

    pool: torch.Tensor
    table: torch.Tensor
    ranks: torch.Tensor
    rank: int
    page_ranks: int
    page_stride: int
    experts: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    widths: tuple[int, ...]
    heights: tuple[int, ...]

    def of(self, slices: slice) -> PagedPieces:
        """Some of the slices."""
        per_slice = {name: getattr(self, name)[slices] for name in ("ranks", "a", "b", "widths", "heights")}
        return self._replace(**per_slice)


def sum_dtype(dtype: torch.dtype) -> tl.dtype:
    """In which kernels add up products: float64 only of float64."""
    return tl.float64 if dtype == torch.float64 else tl.float32


# ---- in kernels: of one slice of one slot. Its A or B begins in page 0 at `begin_ptr`, `table_ptr` is the slot's row


@triton.jit
def rows_of_ranks(
    begin_ptr, table_ptr, page_stride, rank, is_rank, expert, width, PAGE_RANKS: tl.constexpr
):  # fmt: skip
    """Where the rows of some ranks of A or B lie, of `width` elements each: (ranks,) pointers

    The table is read where `is_rank`, which must be true of live ranks and of none past R. What it has past a slot's
    pages leads nowhere. That costs less than to wait for the live rank.
    """
    page = tl.load(table_ptr + rank // PAGE_RANKS, mask=is_rank, other=0).to(tl.int64)
    return begin_ptr + page * page_stride + (expert * PAGE_RANKS + rank % PAGE_RANKS) * width


@triton.jit
def read_b(rows_of_b, columns, is_column, rank, live):
    """B of some ranks and columns, zeros past the live rank: (ranks, columns)   rows_of_b: as `rows_of_ranks` says"""
    is_live = rank < live
    return tl.load(
        rows_of_b[:, None] + columns[None, :], mask=is_live[:, None] & is_column[None, :], other=0.0
    )


@triton.jit
def read_h(h_ptr, rows, is_row, rank, live, R):
    """h of some rows and ranks, zeros past the live rank: (rows, ranks)   h_ptr: of the slice, (T, R)"""
    mask = is_row[:, None] & (rank < live)[None, :]
    return tl.load(h_ptr + rows[:, None] * R + rank[None, :], mask=mask, other=0.0)


@triton.jit
def add_ranks(
    total, start, live, h_ptr, rows, is_row, begin_ptr, table_ptr, page_stride, expert, columns, is_column, width,
    R, PAGE_RANKS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """total + h · B of the ranks from `start` to the live one, BLOCK_R at a time: (rows, columns)"""
    for first in range(start, live, BLOCK_R):
        rank = first + tl.arange(0, BLOCK_R)
        rows_of_b = rows_of_ranks(
            begin_ptr, table_ptr, page_stride, rank, rank < live, expert, width, PAGE_RANKS
        )
        b = read_b(rows_of_b, columns, is_column, rank, live)
        h = read_h(h_ptr, rows, is_row, rank, live, R)
        total = tl.dot(h, b, total, input_precision="ieee", out_dtype=total.dtype)
    return total


@triton.jit
def add_ranks_of_row(
    total, start, live, h, begin_ptr, table_ptr, page_stride, columns, is_column, width,
    PAGE_RANKS: tl.constexpr, BLOCK_R: tl.constexpr, ALL_R: tl.constexpr,
):  # fmt: skip
    """As `add_ranks`, for one row, whose h is there: (columns,). No tensor cores, which want sixteen.   h: (ALL_R,)"""
    for first in range(start, live, BLOCK_R):
        rank = first + tl.arange(0, BLOCK_R)
        rows_of_b = rows_of_ranks(begin_ptr, table_ptr, page_stride, rank, rank < live, 0, width, PAGE_RANKS)
        b = read_b(rows_of_b, columns, is_column, rank, live)
        total += row_times_b(h, rank, b, ALL_R, BLOCK_R)
    return total


@triton.jit
def row_times_b(h, rank, b, ALL_R: tl.constexpr, BLOCK_R: tl.constexpr):
    """h · B of some ranks, for one row: (columns,)   h: (ALL_R,)   b: (BLOCK_R, columns)"""
    if ALL_R > BLOCK_R:
        is_it = tl.arange(0, ALL_R)[:, None] == rank[None, :]
        h = tl.sum(tl.where(is_it, h[:, None], 0.0), axis=0)  # (BLOCK_R,)
    return tl.sum(b.to(h.dtype) * h[:, None], axis=0)
