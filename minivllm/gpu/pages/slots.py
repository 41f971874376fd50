"""Slots whose A's and B's lie in pages.

Beside vllm/lora/layers/base_linear.py (v0.22.1), whose slots are of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.pages.pool import PagePool
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.slots import Slots

# Pieces begin at multiples of so many elements: 16 bytes or more, so that kernels read at full speed.
ALIGNMENT = 16


class PagedSlots(Slots):
    """S slots that take as many pages as the adapter in each has ranks, out of the pool of all layers.

    a, b        shapes and dtype alone, on "meta": nothing is allocated
    pieces      where the kernels find everything, once the pool is bound
    size        elements that a page has for this layer
    page_ranks  ranks that a page has for this layer
    """

    pieces: PagedPieces

    def __init__(
        self,
        slots: Slots,
        outdate: Callable[[Iterable[int]], None],
        pool: PagePool,
        page_ranks: int | None = None,
    ) -> None:
        """page_ranks: None = the pool's; fewer, where other processes have the other ranks of each page"""
        super().__init__([t.to("meta") for t in slots.a], [t.to("meta") for t in slots.b])
        self.page_ranks = page_ranks or pool.page_ranks
        self.beside = slots.beside
        self.pool, self._outdate = pool, outdate
        self.device = slots.a[0].device
        self.experts, self.rank = self.a[0].shape[1], self.a[0].shape[2]
        self.widths = tuple(a.shape[3] for a in self.a)
        self.heights = tuple(b.shape[2] for b in self.b)
        rows = [self.experts * self.page_ranks * length for length in (*self.widths, *self.heights)]
        self._places, self.size = [], 0
        for elements in rows:
            self._places.append(self.size)
            self.size += -(-elements // ALIGNMENT) * ALIGNMENT
        self.ranks = torch.empty(0)
        pool.add(self)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Pages are the pool's."""
        return [table for tables in self.beside.values() for table in tables]

    def bind(self, region: torch.Tensor, stride: int, first: int) -> None:
        """Lie in pages of that region, `stride` elements each, from element `first` of each on."""
        n, places = len(self.a), [first + place for place in self._places]
        self.pieces = PagedPieces(
            *(region, self.pool.table, self.ranks, self.rank, self.page_ranks, stride, self.experts),
            *(tuple(places[:n]), tuple(places[n:]), self.widths, self.heights),
        )

    def unbind(self) -> None:
        """Lie nowhere: nothing is live."""
        del self.pieces
        for live in self.live_ranks:
            live[:] = [0] * len(live)
        self._outdate(range(len(self.live_ranks[0])))

    def bind_ranks(self, ranks: torch.Tensor) -> None:
        """Take the place of its live ranks: (n, S) int32"""
        self.ranks = ranks
        if hasattr(self, "pieces"):
            self.pieces = self.pieces._replace(ranks=ranks)

    def changed(self, slot: int) -> None:
        super().changed(slot)
        self._outdate([slot])

    def write(self, slot: int, parts: Sequence[LoRALayerWeights | None]) -> None:
        """As in `Slots`. The slot has pages for these ranks already, or takes more."""
        ranks = [0 if part is None else part.lora_a.shape[-2] for part in parts]
        self.pool.make_sure_of(slot, max(ranks))
        for i, (part, rank) in enumerate(zip(parts, ranks, strict=True)):
            self.live_ranks[i][slot] = rank
            if part is not None and rank:
                self._write_rows(slot, self.pieces.a[i], self.widths[i], part.lora_a)
                self._write_rows(slot, self.pieces.b[i], self.heights[i], part.lora_b.transpose(-1, -2))
        self._write_beside(slot, parts)
        self.changed(slot)

    def _write_rows(self, slot: int, place: int, width: int, rows: torch.Tensor) -> None:
        """rows: (r, width), or (E, r, width) of experts"""
        by_expert = rows if rows.ndim == 3 else rows[None]
        step, stride = self.page_ranks, self.pieces.page_stride
        for page, share in zip(self.pool.ledger.held[slot], by_expert.split(step, dim=1)):
            first = page * stride + place
            there = self.pieces.pool[first : first + self.experts * step * width]
            there.view(self.experts, step, width)[:, : share.shape[1]].copy_(share, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Nothing is live any more; what is in the pages nobody reads."""
        for live in self.live_ranks:
            live[slot] = 0
        self._write_beside(slot, [None] * len(self.a))
        self.changed(slot)


class PagedB(PagedSlots):
    """The B's of one slice of two-step slots.

    sharding   the `RankSharding` of the processes whose ranks of h stand side by side; None = h has them in order
    """

    sharding: Any = None
