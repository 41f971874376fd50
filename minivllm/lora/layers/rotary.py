"""Adapters trained at a longer context than the base model.

Stands for LinearScalingRotaryEmbeddingWithLoRA in vllm/lora/layers.py (v0.8.5), which v0.22.1 no longer has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from minivllm.layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from minivllm.lora.punica_wrapper import PunicaWrapperBase


class LinearScalingRotaryEmbeddingWithLoRA(nn.Module):
    """The base model's rotary table, and one for each linear factor that adapters may have, end to end.

    A row's position is shifted to where its adapter's table begins, so that one lookup serves the mixed batch.

    factors   1, which base rows and most adapters have, then `long_lora_scaling_factors`
    starts    (S + 1,) int64: where the table of each slot's adapter begins. The last is 0: it is what -1, the slot
              of base rows, looks up
    """

    def __init__(self, base_layer: RotaryEmbedding, factors: tuple[float, ...], max_loras: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.factors = (1.0, *factors)
        tables = [base_layer, *(base_layer.stretched(factor) for factor in factors)]
        self.cos = torch.cat([table.cos for table in tables])  # (sum of positions, 1, D)
        self.sin = torch.cat([table.sin for table in tables])
        first = 0
        self._start_of: dict[float, int] = {}
        for factor, table in zip(self.factors, tables):
            self._start_of[factor] = first
            first += table.max_position
        self.starts = torch.zeros(max_loras + 1, dtype=torch.long, device=self.cos.device)
        self._slot_factors = [1.0] * max_loras
        self.punica_wrapper: PunicaWrapperBase | None = None

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """What it has allocated beside the base model's table."""
        return self.cos, self.sin, self.starts

    def set_mapping(self, punica_wrapper: PunicaWrapperBase) -> None:
        """Hand over the backend that knows the slot of every row."""
        self.punica_wrapper = punica_wrapper

    def set_factors(self, slot_factors: list[float]) -> None:
        """Take in the factor of the adapter in each slot, (S,) of `factors`; 1 for a free one."""
        if slot_factors != self._slot_factors:
            starts = torch.tensor([self._start_of[factor] for factor in (*slot_factors, 1.0)])
            self._slot_factors = []  # until the copy has come to its end, nobody knows what is there
            self.starts.copy_(starts, non_blocking=True)
            self._slot_factors = list(slot_factors)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (T,) int64 -> cos, sin: (T, 1, D), each row by its adapter's table"""
        if self.punica_wrapper.no_lora:
            return self.base_layer(positions)
        shifted = positions + self.starts[self.punica_wrapper.slots_of_tokens(len(positions))]  # (T,)
        return self.cos[shifted], self.sin[shifted]
