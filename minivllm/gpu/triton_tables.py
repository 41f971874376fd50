"""What kernels look up: live ranks, the slot of each row. Beside vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1)."""

from collections.abc import Iterable

import numpy as np
import torch

from minivllm.gpu.triton_slots import TritonSlots
from minivllm.layers.to_device import to_device


class LiveRanks:
    """The live ranks of all layers. Kernels read them where `ranks` lies once all layers are there.

    ranks   (sum of n over layers, S) int32: live rank of each slice and slot
    """

    def __init__(self, max_loras: int, device: torch.device | str) -> None:
        self.ranks = torch.zeros(0, max_loras, dtype=torch.int32, device=device)
        self._ranks = np.zeros((0, max_loras), dtype=np.int32)  # as they are on the device, or will be
        self._stale_slots: set[int] = set()
        self._placed: list[TritonSlots] = []

    def keep(self, slots: TritonSlots) -> None:
        """Make room for those of one layer more."""
        self._placed.append(slots)
        count = sum(len(placed.a) for placed in self._placed)
        self.ranks = self.ranks.new_zeros(count, self.ranks.shape[1])
        first = 0
        for placed in self._placed:
            placed.bind_ranks(self.ranks[first : (first := first + len(placed.a))])
        self._ranks = np.zeros(self.ranks.shape, dtype=np.int32)
        self._stale_slots.update(range(self.ranks.shape[1]))

    def outdate(self, slots: Iterable[int]) -> None:
        """Those of these slots are no longer those on the device."""
        self._stale_slots.update(slots)

    def sync(self) -> None:
        """Bring those on the device up to date."""
        if self._stale_slots:
            for slot in self._stale_slots:
                live = [ranks[slot] for slots in self._placed for ranks in slots.live_ranks]
                self._ranks[:, slot] = live
            self.ranks.copy_(to_device(self._ranks.copy(), self.ranks.device), non_blocking=True)
            self._stale_slots.clear()


class RowSlots:
    """The slot of each row of a step, on the device, in buffers that stay where they are.

    tokens   (most tokens,) int64 slot of each token, -1 = base
    samples  (most sampled rows,) int64, likewise
    """

    def __init__(self, max_tokens: int, max_samples: int, device: torch.device | str) -> None:
        self.tokens = torch.full((max_tokens,), -1, dtype=torch.long, device=device)
        self.samples = torch.full((max_samples,), -1, dtype=torch.long, device=device)
        self._copied: torch.Tensor | None = None  # what the two hold
        self._found_in: torch.Tensor | None = None
        self._found: set[int] = set()

    def copy(self, tokens: torch.Tensor, samples: torch.Tensor) -> None:
        """Take in a step's; once, however often it is called.   on the CPU, (T,) and (P,) int64"""
        if self._copied is not tokens:
            self.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
            self.samples[: len(samples)].copy_(samples, non_blocking=True)
            self._copied = tokens

    def slots_in(self, tokens: torch.Tensor) -> set[int]:
        """Slots that a step uses; found once a step, and only if somebody asks."""
        if self._found_in is not tokens:
            self._found = set(tokens.tolist()) - {-1}
            self._found_in = tokens
        return self._found
