"""The memory that adapters share, in pages of a few ranks each.

Beside vllm/lora/model_manager.py (v0.22.1), whose slots are of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from minivllm.config import PAGE_RANKS
from minivllm.gpu.pages.ledger import Lender, PageLedger
from minivllm.layers.to_device import to_device


class Paged(Protocol):
    """What lies in pages: the slots of a layer, `size` elements a page."""

    size: int
    a: tuple[torch.Tensor, ...]
    device: torch.device

    def bind(self, region: torch.Tensor, stride: int, first: int) -> None: ...

    def unbind(self) -> None: ...


class PagePool:
    """Pages for the adapters of all layers, and the table in which kernels find them.

    A page has PAGE_RANKS ranks of every layer. It lies in one or more *regions*, each of which has the same number of
    pages for some of the layers: a region may be a part of a layer's KV cache, whose blocks are then the page's.

    table      (S, G) int32 on the device: pages of each slot. It stays where it is, so CUDA graphs may read it
    ledger     who has which page
    """

    page_ranks = PAGE_RANKS

    def __init__(self, max_loras: int, max_rank: int, device: torch.device | str) -> None:
        self.pages_a_slot = -(-max_rank // PAGE_RANKS)
        self.table = torch.zeros(max_loras, self.pages_a_slot, dtype=torch.int32, device=device)
        self.ledger = PageLedger(0)
        self.layers: list[Paged] = []
        self.regions: list[torch.Tensor] = []
        self._synced = 0

    def add(self, layer: Paged) -> None:
        """One layer more; before the pool is bound."""
        self.layers.append(layer)
        self.regions = []

    def pages_for(self, rank: int) -> int:
        return -(-rank // PAGE_RANKS)

    @property
    def nbytes(self) -> int:
        """Of what was allocated for the pool alone."""
        return sum(region.nbytes for region in self.regions) if self._is_own else 0

    _is_own = False
    page_bytes = 0  # of a page in all regions, once bound

    def by_region(self, regions: int) -> list[list[Paged]]:
        """The layers of each region: in order, and about as much in each."""
        share = -(-sum(layer.size for layer in self.layers) // regions)
        share = max([share, *(layer.size for layer in self.layers)])
        found: list[list[Paged]] = [[]]
        for layer in self.layers:
            used = sum(other.size for other in found[-1])
            if used + layer.size > share and len(found) < regions:
                found.append([])
            found[-1].append(layer)
        return found

    def page_elements(self, regions: int) -> int:
        """Elements of a page in each of so many regions, the largest share."""
        return max(sum(layer.size for layer in layers) for layers in self.by_region(regions))

    def bind(self, regions: Sequence[torch.Tensor], stride: int, lender: Lender | None = None) -> None:
        """Lie in these regions, flat and of one length, `stride` elements a page. What slots held is forgotten."""
        self.regions, self._is_own = list(regions), False
        self.page_bytes = len(regions) * stride * regions[0].itemsize
        self.ledger = PageLedger(len(regions[0]) // stride, lender)
        self._synced = 0
        for region, layers in zip(regions, self.by_region(len(regions))):
            first = 0
            for layer in layers:
                layer.bind(region, stride, first)
                first += layer.size

    def bind_own(self, pages: int) -> None:
        """Lie in memory of its own, with so many pages."""
        like, stride = self.layers[0], self.page_elements(1)
        region = torch.empty(pages * stride, dtype=like.a[0].dtype, device=like.device)
        self.bind([region], stride)
        self._is_own = True

    def unbind(self) -> None:
        """Give the memory back."""
        self.regions, self.ledger = [], PageLedger(0)
        for layer in self.layers:
            layer.unbind()

    def make_sure_of(self, slot: int, rank: int) -> None:
        """Have pages for that rank in a slot; more than it has only if it must."""
        if not self.regions:
            self.bind_own(len(self.table) * self.pages_a_slot)
        if self.pages_for(rank) > len(self.ledger.held.get(slot, [])):
            self.ledger.assign(0, slot, self.pages_for(rank))

    def sync(self) -> None:
        """Bring the device's table up to date, if a slot's pages have changed."""
        if self._synced == self.ledger.version:
            return
        rows = np.zeros(self.table.shape, dtype=np.int32)
        for slot, pages in self.ledger.held.items():
            rows[slot, : len(pages)] = pages
        self.table.copy_(to_device(rows, self.table.device), non_blocking=True)
        self._synced = self.ledger.version
