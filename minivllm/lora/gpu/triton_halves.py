"""Slots of which kernels use A and B apart. Beside vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

from typing import Any

import torch

from minivllm.lora.backend import ALL_SLICES
from minivllm.lora.gpu.triton_tables import TritonTables
from minivllm.lora.ops.triton_ops import TileList, expand, shrink
from minivllm.lora.options.halved_slots import HalvedSlots
from minivllm.lora.slots import Slots


class TritonHalves(HalvedSlots):
    """As `HalvedSlots`, but a shrink gives h itself, and one expand takes that of all slices.

    shrinks  the A's alone    expands  n x (S * E, N_i, R), the B's
    """

    def _place(self, backend: TritonTables) -> None:
        no_b = [a.new_empty(*a.shape[:2], 1, 0) for a in self.a]  # (S, E, 1, 0)
        self.shrinks = backend.place(Slots(self.a, no_b), None)
        self.expands = [b.flatten(0, 1) for b in self.b]

    def shrink(
        self, x: torch.Tensor, backend: Any, rows: TileList | None = None, slices: slice = ALL_SLICES
    ) -> torch.Tensor:
        """As in the parent class, in float32. What base rows have may be anything."""
        a, ranks, experts = self.shrinks.flat_a[slices], self.shrinks.ranks[slices], self.a[0].shape[1]
        if experts > 1:
            ranks = ranks.repeat_interleave(experts, dim=1)  # (n, S * E)
        planes = shrink(
            x, a, backend.token_rows(len(x)) if rows is None else rows, ranks
        )  # (splits, n, T, R')
        h = planes.new_empty(len(x), len(a), planes.shape[-1])
        torch.sum(planes, 0, out=h.transpose(0, 1))
        return h

    def expand(
        self, y: torch.Tensor, h: torch.Tensor, backend: Any, rows: TileList, slices: slice = ALL_SLICES
    ) -> None:
        expand(h.transpose(0, 1)[None], self.expands[slices], y, rows)  # h: (1, n, T, R)
