"""Slots as kernels take them. Beside vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

from collections.abc import Callable, Iterable

import torch

from minivllm.lora.slots import Slots

SECTOR_BYTES = 32


class TritonSlots(Slots):
    """Slots that tell the kernels where they are, and the backend when its live ranks are out of date.

    flat_a, flat_b   n x (S * E, R, K_i), n x (S * E, N_i, R): what kernels take
    ranks            (n, S) int32 on the device
    expand_ranks     those, or None where looking a rank up costs more than it saves: memory comes in sectors, so
                     a row of B is one read
    """

    def __init__(self, slots: Slots, outdate: Callable[[Iterable[int]], None]) -> None:
        """outdate: called with slots that have changed"""
        super().__init__(slots.a, slots.b)
        self.take_over(slots)
        self._outdate = outdate
        self.flat_a, self.flat_b = ([t.flatten(0, 1) for t in side] for side in (self.a, self.b))
        self.ranks, self.expand_ranks = torch.empty(0), None

    def changed(self, slot: int) -> None:
        super().changed(slot)
        self._outdate([slot])

    def bind_ranks(self, ranks: torch.Tensor) -> None:
        """Take the place of its live ranks: (n, S) int32"""
        self.ranks = ranks
        self.expand_ranks = None if self.b[0][0, 0, 0].nbytes <= SECTOR_BYTES else ranks
