"""`TwoStepSlots` in pages. Beside vllm/lora/layers (v0.22.1), whose slots are of one size.

A page has PAGE_RANKS ranks of each B. Of an A whose ranks processes share out it has this process's of just these.
So all processes number their pages alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from minivllm.config import PAGE_RANKS
from minivllm.gpu.pages.slots import PagedB, PagedSlots
from minivllm.layers.ranks import Ranks
from minivllm.lora.backend import ALL_SLICES
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.slots import Slots
from minivllm.options.two_step_slots import RankSharding, TwoStepSlots


class PagedTwoStepSlots(TwoStepSlots):
    """As `TwoStepSlots`, where R is a multiple of PAGE_RANKS, and this of the number of processes.

    a, b     shapes and dtype alone, on "meta"
    groups_of_a   the A's of which processes share out the ranks, and the A's that have all ranks, as far as there are
                  any: (numbers of the slices, ascending; the slots with their A's)
    expands  n slots of one slice each, the B's
    live_ranks_of_b   as `live_ranks`, of B: that of an A is what this process has of them
    """

    def __init__(
        self,
        slots: Slots,
        tp: Ranks,
        sharded: slice,
        place: Callable[[type[PagedSlots], Slots, int], Any],
    ) -> None:
        """place: makes slots of that class, with so many ranks a page, and keeps them"""
        Slots.__init__(self, [t.to("meta") for t in slots.a], [t.to("meta") for t in slots.b])
        self.beside = slots.beside
        self.sharding = RankSharding(tp.rank, tp.size, PAGE_RANKS // tp.size)
        self._numbers = list(range(len(self.a)))
        of_sharded = self._numbers[sharded]
        of_whole = [i for i in self._numbers if i not in of_sharded]
        self.groups_of_a: list[tuple[list[int], PagedSlots]] = []
        for numbers, page_ranks in ((of_sharded, self.sharding.block), (of_whole, PAGE_RANKS)):
            if numbers:
                a = [slots.a[i] for i in numbers]
                without_b = Slots(a, [t.new_empty(*t.shape[:2], 0, t.shape[2]) for t in a])
                self.groups_of_a.append((numbers, place(PagedSlots, without_b, page_ranks)))
        self.expands = []
        for i, b in enumerate(slots.b):
            without_a = Slots([b.new_empty(*b.shape[:2], b.shape[3], 0)], [b])
            self.expands.append(place(PagedB, without_a, PAGE_RANKS))
            self.expands[i].sharding = self.sharding if i in of_sharded else None
        places = {i: (group, j) for numbers, group in self.groups_of_a for j, i in enumerate(numbers)}
        self.where = [places[i] for i in self._numbers]  # of each slice's A
        self.live_ranks = [group.live_ranks[j] for group, j in self.where]
        self.live_ranks_of_b = [b.live_ranks[0] for b in self.expands]

    @property
    def memory(self) -> list[torch.Tensor]:
        """Pages are the pool's."""
        return [table for tables in self.beside.values() for table in tables]

    @property
    def parts(self) -> list[PagedSlots]:
        """All that lies in pages."""
        return [*(group for _, group in self.groups_of_a), *self.expands]

    def write(self, slot: int, parts: list[LoRALayerWeights | None]) -> None:
        """B first: it has all ranks, so that the slot takes as many pages as the adapter needs."""
        for own, part in zip(self.expands, parts, strict=True):
            own.write(
                slot, [part and replace(part, lora_a=_nothing(part.lora_b.transpose(-1, -2)), beside={})]
            )
        for numbers, group in self.groups_of_a:
            of_group = [parts[i] for i in numbers]
            without_b = (
                p and replace(p, lora_b=_nothing(p.lora_a).transpose(-1, -2), beside={}) for p in of_group
            )
            group.write(slot, list(without_b))
        self._write_beside(slot, parts)

    def clear(self, slot: int) -> None:
        for own in self.parts:
            own.clear(slot)
        self._write_beside(slot, [None] * len(self.a))

    def changed(self, slot: int) -> None:
        for own in self.parts:
            own.changed(slot)

    def shrink(
        self, x: torch.Tensor, backend: Any, rows: Any = None, slices: slice = ALL_SLICES
    ) -> torch.Tensor:
        """As in the parent class, for slices of one of the `groups_of_a`. What is past a live rank may be anything."""
        wanted = self._numbers[slices]
        group = next(group for numbers, group in self.groups_of_a if numbers == wanted)
        h = backend.shrink(x, group, backend.token_rows(len(x)) if rows is None else rows)  # (n, T, R')
        return h.transpose(0, 1)


def _nothing(rows: torch.Tensor) -> torch.Tensor:
    """(..., r, columns) -> (..., r, 0)"""
    return rows[..., :0]
