"""Adapters into pages on a GPU: one transfer and two launches each, beside steps.

Stands for `set_lora` in vllm/lora/layers/base_linear.py (v0.22.1).
"""

import torch

from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.pages.pool import PagePool
from minivllm.gpu.pages.slots import PagedSlots
from minivllm.gpu.slot_writer import SlotWriter
from minivllm.lora.slots import Slots
from minivllm.lora.wrapping import WrappedModules


class PagedSlotWriter(SlotWriter):
    """As `SlotWriter`, for layers of which some have their slots in pages.

    pool           the pages
    page_places    (P, 5) int64, see `write_pages`; of width 0 for what is in no page. Made when the pool is bound
    largest_piece  elements of the largest A or B that a page's ranks may come to
    """

    def __init__(self, wrapped: WrappedModules, device: torch.device | str, pool: PagePool) -> None:
        self.pool = pool
        super().__init__(wrapped, device)
        sizes = [max(*slots.widths, *slots.heights) * slots.rank for slots in self._paged()]
        self.largest_piece = max(sizes, default=0)
        self.page_places = torch.zeros(len(self.places), 5, dtype=torch.int64)
        self._bound_to: list[torch.Tensor] | None = None

    def _paged(self) -> list[PagedSlots]:
        """All that lies in pages; A's and B's may do so apart."""
        slots = [module.slots for module in self.modules.values()]
        parts = [part for own in slots for part in getattr(own, "parts", ())]  # of `PagedTwoStepSlots`
        return [*(own for own in slots if isinstance(own, PagedSlots)), *parts]

    def _scatter(self, weights: torch.Tensor, table: torch.Tensor, slot: int) -> None:
        from minivllm.gpu.kernels.write_pages_op import write_pages  # Triton is not everywhere

        super()._scatter(weights, table, slot)
        if self._bound_to is not self.pool.regions:
            self._bind()
        pages = torch.tensor(self.pool.ledger.held.get(slot, [0]), dtype=torch.int32)
        pages = pages.to(self.places.device, non_blocking=True)
        write_pages(weights, table, self.page_places, pages, self.largest_piece)

    def _bind(self) -> None:
        """Note where the pieces lie in the pool as it is bound now, in the order of `_pieces`."""
        rows: list[list[int]] = []
        for module in self.modules.values():
            slots = module.slots
            for i, a in enumerate(slots.a):
                sides = _sides(slots, i)
                for expert in range(a.shape[1]):
                    rows += [_place(*side, expert) for side in sides] or [IN_NO_PAGE] * 2
            rows += [IN_NO_PAGE] * sum(len(tables) for tables in slots.beside.values())
        self.page_places = torch.tensor(rows, device=self.places.device)
        self._bound_to = self.pool.regions


IN_NO_PAGE = [0] * 5


def _sides(slots: Slots, i: int) -> list[tuple[PagedPieces, int, int, int]]:
    """Of slice i's A and of its B: the pieces, where it begins in a page, its width, 1 for a B. [] = in no page"""
    if where := getattr(slots, "where", None):  # of `PagedTwoStepSlots`
        half, j = where[i]
        of_a, of_b = half.pieces, slots.expands[i].pieces
        return [(of_a, of_a.a[j], of_a.widths[j], 0), (of_b, of_b.b[0], of_b.heights[0], 1)]
    if not isinstance(slots, PagedSlots):
        return []
    pieces = slots.pieces
    return [(pieces, pieces.a[i], pieces.widths[i], 0), (pieces, pieces.b[i], pieces.heights[i], 1)]


def _place(pieces: PagedPieces, first: int, width: int, is_b: int, expert: int) -> list[int]:
    """A row of `page_places`."""
    first += expert * pieces.page_ranks * width
    address = pieces.pool.data_ptr() + first * pieces.pool.itemsize
    return [address, pieces.page_stride, width, is_b, pieces.page_ranks]
