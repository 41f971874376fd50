"""How adapters on experts are computed. Stands for a part of vllm/lora/layers/fused_moe.py (v0.22.1)."""

from typing import Any

import torch

from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.ranks import Share
from minivllm.lora.backend import Backend
from minivllm.lora.lora_weights import PackedLoRALayerWeights
from minivllm.lora.slots import Slots

# Which of the slices, w1, w2, w3 or w13, w2, are added to what w13 gives, and which to what w2 gives.
W13, W2 = slice(0, None, 2), slice(1, 2)


class ExpertsArithmetic:
    """By the backend, which no process need meet for; `ShardedExperts` is the other way.

    share     which part of each A and B this process has
    max_rank  R
    backend   from `place` on
    """

    def __init__(self, base_layer: FusedMoE, share: Share, max_rank: int) -> None:
        self.tp, self.share, self.max_rank = base_layer.tp, share, max_rank
        self.backend: Backend | None = None

    def cut_slots(self, slots: Slots) -> Slots:
        """New slots as far as they are this process's."""
        return slots

    def place(self, slots: Slots, backend: Backend) -> Slots:
        """The same where the backend wants them."""
        self.backend = backend
        return backend.place(slots, None)

    def own(self, packed: PackedLoRALayerWeights, slots: Slots) -> PackedLoRALayerWeights:
        """Packed weights as these slots take them."""
        return packed

    def is_reached(self, slots: Slots) -> bool:
        """Whether an adapter of this step has experts."""
        return not self.backend.no_lora and self.backend.reaches(slots)

    def add(self, y: torch.Tensor, x: torch.Tensor, slots: Slots, rows: Any, slices: slice) -> None:
        """Add what adapters give for w13's or w2's output.   y: (P, N), x: (P, K)"""
        self.backend.add(y, x, slots, rows, slices)
