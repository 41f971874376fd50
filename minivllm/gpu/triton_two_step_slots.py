"""`TwoStepSlots` of the triton backend. Beside vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

from typing import Any

import torch

from minivllm.gpu.sgmv import TileList, expand, shrink
from minivllm.lora.backend import ALL_SLICES, Backend
from minivllm.lora.slots import Slots
from minivllm.options.two_step_slots import TwoStepSlots

# Planes of so many bytes travel as they are. On two H200 a sum of 256 KiB took 0.8 us more than one of 8 KiB; to add
# planes up first is a launch.
MOST_BYTES = 1 << 18


class TritonTwoStepSlots(TwoStepSlots):
    """As `TwoStepSlots`, but one launch gives h, and one expands that of all slices.

    shrinks  the A's alone    expands  n x (S * E, N_i, R), the B's
    """

    def _place(self, backend: Backend) -> None:
        no_b = [a.new_empty(*a.shape[:2], 1, 0) for a in self.a]  # (S, E, 1, 0)
        self.shrinks = backend.place(Slots(self.a, no_b), None)
        self.expands = [b.flatten(0, 1) for b in self.b]

    def shrink(
        self, x: torch.Tensor, backend: Any, rows: TileList | None = None, slices: slice = ALL_SLICES
    ) -> torch.Tensor:
        """h in planes that `expand` adds up, (splits, n, T, R') float32. What base rows have may be anything."""
        a, ranks, experts = self.shrinks.flat_a[slices], self.shrinks.ranks[slices], self.a[0].shape[1]
        if experts > 1:
            ranks = ranks.repeat_interleave(experts, dim=1)  # (n, S * E)
        planes = shrink(x, a, backend.token_rows(len(x)) if rows is None else rows, ranks)
        return planes if planes.nbytes <= MOST_BYTES else planes.sum(0, keepdim=True)

    def expand(
        self, y: torch.Tensor, h: torch.Tensor, backend: Any, rows: TileList, slices: slice = ALL_SLICES
    ) -> None:
        expand(h, self.expands[slices], y, rows)
