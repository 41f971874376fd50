"""Adapters into pages on a GPU: one transfer and two launches each, beside steps.

Stands for `set_lora` in vllm/lora/layers/base_linear.py (v0.22.1).
"""

import torch

from minivllm.lora.gpu.ops.paged_pieces import PagedPieces
from minivllm.lora.gpu.page_pool import PagePool
from minivllm.lora.gpu.paged_slots import PagedSlots
from minivllm.lora.gpu.slot_writer import SlotWriter
from minivllm.lora.wrapped_modules import WrappedModules


class PagedSlotWriter(SlotWriter):
    """As `SlotWriter`, for layers of which some have their slots in pages.

    pool           the pages
    page_places    (P, 4) int64, see `write_pages`; of width 0 for what is in no page. Made when the pool is bound
    largest_piece  elements of the largest A or B that a page's ranks may come to
    """

    def __init__(self, wrapped: WrappedModules, device: torch.device | str, pool: PagePool) -> None:
        self.pool = pool
        super().__init__(wrapped, device)
        sizes = [max(*slots.widths, *slots.heights) * slots.rank for slots in self._paged()]
        self.largest_piece = max(sizes, default=0)
        self.page_places = torch.zeros(len(self.places), 4, dtype=torch.int64)
        self._bound_to: list[torch.Tensor] | None = None

    def _paged(self) -> list[PagedSlots]:
        return [module.slots for module in self.modules.values() if isinstance(module.slots, PagedSlots)]

    def _scatter(self, weights: torch.Tensor, table: torch.Tensor, slot: int) -> None:
        from minivllm.lora.gpu.ops.write_pages_op import write_pages  # Triton is not everywhere

        super()._scatter(weights, table, slot)
        if self._bound_to is not self.pool.regions:
            self._bind()
        pages = torch.tensor(self.pool.ledger.held.get(slot, [0]), dtype=torch.int32)
        pages = pages.to(self.places.device, non_blocking=True)
        write_pages(weights, table, self.page_places, pages, self.pool.page_ranks, self.largest_piece)

    def _bind(self) -> None:
        """Note where the pieces lie in the pool as it is bound now, in the order of `_pieces`."""
        rows: list[list[int]] = []
        for module in self.modules.values():
            slots = module.slots
            if isinstance(slots, PagedSlots):
                for i in range(len(slots.a)):
                    for expert in range(slots.experts):
                        rows += _places(slots.pieces, i, expert)
            else:
                rows += [[0, 0, 0, 0]] * sum(2 * a.shape[1] for a in slots.a)
            rows += [[0, 0, 0, 0]] * sum(len(tables) for tables in slots.beside.values())
        self.page_places = torch.tensor(rows, device=self.places.device)
        self._bound_to = self.pool.regions


def _places(pieces: PagedPieces, i: int, expert: int) -> list[list[int]]:
    """The rows of one A and its B."""
    where = (pieces.a[i], pieces.widths[i], 0), (pieces.b[i], pieces.heights[i], 1)
    return [
        [
            pieces.pool.data_ptr() + (first + expert * pieces.page_ranks * width) * pieces.pool.itemsize,
            pieces.page_stride,
            width,
            is_b,
        ]
        for first, width, is_b in where
    ]
