"""Slots whose adapters are computed in two steps, because processes meet in between: shrink, collective, expand.

h = A x is gathered or summed over the processes before B is applied (fully_sharded.py). Plain slots do both in one call
of the backend. Here is the form that any backend can compute; gpu/ has one for the triton backend and one in pages.

Stands for `add_shrink` and `add_expand` in vllm/lora/punica_wrapper/punica_base.py (v0.22.1), for every slot there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from minivllm.layers.ranks import Ranks, Share
from minivllm.lora.backend import ALL_SLICES, Backend
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.slots import Slots


@dataclass(frozen=True)
class RankSharding:
    """Which ranks of an A a process has, in a block-cyclic distribution.

    The first process has the first `block` ranks, the next as many, and after the last process it is the first one's
    turn again.

    process, processes   this one, of how many
    """

    process: int
    processes: int
    block: int

    def of(self, ranks: int) -> list[int]:
        """Those of so many ranks, ascending."""
        return [rank for rank in range(ranks) if rank // self.block % self.processes == self.process]

    def in_order(self, h: torch.Tensor) -> torch.Tensor:
        """All ranks in their order, of those of each process side by side.   (..., processes * block * rounds)"""
        return h.unflatten(-1, (self.processes, -1, self.block)).transpose(-2, -3).flatten(-3)


@dataclass
class ShardedRanks(Share):
    """The process's ranks of every A (`sharding`); of B, and of what is beside it, the same as another share.

    of_whole_a   that other share, which leaves every A whole
    """

    of_whole_a: Share
    sharding: RankSharding

    def sizes(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return self.of_whole_a.sizes(sizes)

    def of_a(self, i: int, lora_a: torch.Tensor) -> torch.Tensor:
        return lora_a[..., self.sharding.of(lora_a.shape[-2]), :]

    def of_b(self, i: int, lora_b: torch.Tensor) -> torch.Tensor:
        return self.of_whole_a.of_b(i, lora_b)

    def of(self, parts: list[Any]) -> list[Any]:
        return [
            part and replace(part, lora_a=self.of_a(0, part.lora_a)) for part in self.of_whole_a.of(parts)
        ]


def two_step(slots: Slots, backend: Backend, tp: Ranks, sharded: slice) -> "TwoStepSlots":
    """The same slots for two steps, as the backend lays them out.

    sharded   slices of whose A each process has some ranks; `sharding` of the result says which
    """
    make = getattr(backend, "two_step", None)  # of a backend that has kernels for the single steps
    return TwoStepSlots(slots, backend, tp) if make is None else make(slots, tp, sharded)


def two_step_linear(slots: Slots, share: Share, backend: Backend, tp: Ranks) -> tuple["TwoStepSlots", Share]:
    """The same for a linear of several processes, and its share.

    A share of some ranks of A becomes a share of those that these slots have.
    """
    if share.ranks is None:
        return two_step(slots, backend, tp, slice(0, 0)), share
    in_two = two_step(slots, backend, tp, ALL_SLICES)
    return in_two, ShardedRanks(replace(share, ranks=None), in_two.sharding)


class TwoStepSlots(Slots):
    """Slots of which a backend computes `shrink` and `expand` apart. R' rows of A may be fewer than R.

    a        n buffers (S, E, R', K)    b   n buffers (S, E, N_i, R)
    shrinks  the same A's, with ones on the diagonal for B's: what a backend adds for them is h = A · x
    expands  n slots of one slice each, the same B's
    sharding   which ranks of A this process has
    """

    def __init__(self, slots: Slots, backend: Backend, tp: Ranks) -> None:
        super().__init__(slots.a, slots.b)
        self.sharding = RankSharding(tp.rank, tp.size, -(-self.b[0].shape[3] // tp.size))
        self._place(backend)
        self.live_ranks = self.shrinks.live_ranks

    def _place(self, backend: Backend) -> None:
        """Make `shrinks` and `expands`."""
        ones = [torch.zeros_like(a[..., :1]).repeat(1, 1, 1, a.shape[2]) for a in self.a]  # (S, E, R', R')
        for diagonal in ones:
            diagonal.diagonal(dim1=-2, dim2=-1).fill_(1)
        self.shrinks = backend.place(Slots(self.a, ones), None)
        self.expands = [
            backend.place(Slots([b.new_zeros(*b.shape[:2], b.shape[3], 0)], [b]), None) for b in self.b
        ]

    @property
    def memory(self) -> list[torch.Tensor]:
        return [*super().memory, *self.shrinks.b]

    def write(self, slot: int, parts: list[LoRALayerWeights | None]) -> None:
        for i, part in zip(range(len(self.a)), parts, strict=True):
            self.a[i][slot], self.b[i][slot] = 0, 0
            self.live_ranks[i][slot] = 0 if part is None else part.lora_a.shape[-2]
            if part is not None:
                self.a[i][slot, :, : part.lora_a.shape[-2]].copy_(part.lora_a)
                self.b[i][slot, :, :, : part.lora_b.shape[-1]].copy_(part.lora_b)
        self._write_beside(slot, parts)
        self.changed(slot)

    def clear(self, slot: int) -> None:
        self.write(slot, [None] * len(self.a))

    def changed(self, slot: int) -> None:
        super().changed(slot)
        self.shrinks.changed(slot)

    def shrink(
        self, x: torch.Tensor, backend: Backend, rows: Any = None, slices: slice = ALL_SLICES
    ) -> torch.Tensor:
        """h = A · x of each of these slices, by each row's adapter, at least in float32.

        x: (T, K) -> (T, n, R'), R' being one for all of them    rows: None = one row a token
        A subclass may give h another form, which its `expand` takes: terms that may be summed, with ranks last.
        """
        heights = [a.shape[2] for a in self.a[slices]]
        h = x.new_zeros(len(x), sum(heights), dtype=torch.promote_types(x.dtype, torch.float32))
        backend.add(h, x, self.shrinks, backend.token_rows(len(x)) if rows is None else rows, slices)
        return h.unflatten(1, (len(heights), heights[0]))

    def expand(
        self, y: torch.Tensor, h: torch.Tensor, backend: Backend, rows: Any, slices: slice = ALL_SLICES
    ) -> None:
        """y += B · h of each of these slices, side by side.   y: (T, sum of N_i)   h: (T, n, R)"""
        columns = y.split([b.shape[2] for b in self.b[slices]], dim=1)
        for i, (own, slots) in enumerate(zip(columns, self.expands[slices], strict=True)):
            backend.expand(own, h[:, i], slots, rows)
