"""What adapters add to a linear's output, for a kernel that reads the output anyway.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), whose launch it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList


class Update(NamedTuple):
    """h · Bᵀ of every row's own slot, not yet multiplied. It has n slices, of N_i columns each.

    h              (n, T, R), ranks side by side: the h of each row, or of slot 0 in a product that has all slots'
    h_slot_stride  from one slot's h to the next; 0 = one h a row
    b              n tensors in which B lies
    b_firsts       n: where in that
    slot_strides   n: from one slot's B to the next, or with a table from one page to the next
    rank_strides   n: from one rank to the next
    column_stride  from one column to the next
    table          (S, G) int32 pages of each slot; None = slot s is page s, and has all ranks
    page_ranks     ranks of a page
    ranks          (n, S) int32 live ranks; None = R everywhere
    rank           R, the largest
    heights        N_i
    """

    h: torch.Tensor
    h_slot_stride: int
    b: tuple[torch.Tensor, ...]
    b_firsts: tuple[int, ...]
    slot_strides: tuple[int, ...]
    rank_strides: tuple[int, ...]
    column_stride: int
    table: torch.Tensor | None
    page_ranks: int
    ranks: torch.Tensor | None
    rank: int
    heights: tuple[int, ...]

    @property
    def table_row(self) -> int:
        """From one slot's pages to the next one's in the table; 0 where there is none."""
        return 0 if self.table is None else self.table.stride(0)

    @property
    def ranks_of_first(self) -> torch.Tensor | None:
        """(S,) live ranks of the first slice; None = R everywhere"""
        return None if self.ranks is None else self.ranks[0]

    @classmethod
    def of_pages(cls, h: torch.Tensor, pieces: PagedPieces) -> Update:
        """h: (n, T, R) of the pages' dtype, as `paged_shrink` gives it; no experts"""
        n = len(pieces.b)
        places = (pieces.pool,) * n, pieces.b, (pieces.page_stride,) * n, pieces.heights, 1, pieces.table
        return cls(h, 0, *places, pieces.page_ranks, pieces.ranks, pieces.rank, pieces.heights)

    @classmethod
    def of_slots(
        cls, h: torch.Tensor, lora_b: Sequence[torch.Tensor], ranks: torch.Tensor | None, h_slot_stride: int
    ) -> Update:
        """h: (n, T, R) of slot 0   lora_b: n x (S, N_i, R) of one row stride, rank contiguous   ranks: (n, S)"""
        n, (_, _, rank) = len(lora_b), lora_b[0].shape
        strides = tuple(b.stride(0) for b in lora_b), (1,) * n, lora_b[0].stride(1)
        heights = tuple(b.shape[1] for b in lora_b)
        return cls(h, h_slot_stride, tuple(lora_b), (0,) * n, *strides, None, rank, ranks, rank, heights)


class DeferredUpdate(NamedTuple):
    """What adapters add to a linear's output y, which does not have it yet.

    update   as kernels take it that read y anyway (gpu/fused)
    tiles    of all T rows
    slots    (T,) int64 slot of each row, -1 = base
    add_to   y += it, by a kernel of its own: what there is to do where no other kernel takes it
    """

    update: Update
    tiles: TileList
    slots: torch.Tensor
    add_to: Callable[[torch.Tensor], None]


@triton.jit
def begins_of_b(
    b_ptr, table_ptr, slot, table_row, slot_stride, rank_stride, rank, is_rank, PAGE_RANKS: tl.constexpr
):  # fmt: skip
    """Where column 0 of some ranks of a slot's B lies: (ranks,) pointers

    Where `is_rank`, which must be true of live ranks and of none past R, the table is read. What it has past a slot's
    pages leads nowhere. That costs less than to wait for the live rank.
    """
    if table_ptr is None:
        begins = slot * slot_stride + rank * rank_stride
    else:
        page = tl.load(table_ptr + slot * table_row + rank // PAGE_RANKS, mask=is_rank, other=0).to(tl.int64)
        begins = page * slot_stride + rank % PAGE_RANKS * rank_stride
    return b_ptr + begins


@triton.jit
def live_rank(ranks_ptr, slot, R):
    """0 where there is no slot."""
    is_slot = slot >= 0
    return tl.where(is_slot, R, 0) if ranks_ptr is None else tl.load(ranks_ptr + slot, mask=is_slot, other=0)


@triton.jit
def read_ranks(places, rank, live, R, table_ptr, is_column, DIM: tl.constexpr):
    """B where these pointers lead, of ranks along DIM: zeros past the live rank and outside columns.

    A slot's ranks lie side by side, where a thread reads 16 bytes at once or each rank alone. So up to seven more are
    read, and dropped.
    """
    is_live = tl.expand_dims(rank < live, 1 - DIM)
    if table_ptr is None:
        is_read = tl.expand_dims((rank // 8 * 8 < live) & (rank < R), 1 - DIM)
        b = tl.where(is_live, tl.load(places, mask=is_read & is_column, other=0.0), 0.0)
    else:
        b = tl.load(places, mask=is_live & is_column, other=0.0)
    return b
