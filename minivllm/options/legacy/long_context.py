"""Adapters trained at a longer context than the base model.

Stands for LinearScalingRotaryEmbeddingWithLoRA in vllm/lora/layers.py (v0.8.5) and a part of vllm/lora/peft_helper.py
(v0.9), which v0.22.1 no longer have.
"""

import math
from typing import Any

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.errors import is_integral, shown
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.lora.backend import Backend
from minivllm.lora.checks import NeedsOption
from minivllm.lora.extensions import AdapterOption, WrappedOption
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.wrapping import WrappedModules, replace_submodule

# Longer than any model. What a file gives goes into float arithmetic, which a JSON int can overflow.
LONGEST_CONTEXT = 2**32


class LongContext(AdapterOption):
    """Adapters that were trained with the base model's positions stretched by a linear factor."""

    config_field = "context_length"

    def read_config(self, length: Any, peft_helper: PEFTHelper) -> None:
        """Put `scaling_factor` beside a config: by how much it stretches the base model's positions, if at all.

        It is ceil(context_length / vllm_max_position_embeddings). ValueError for what is no length.
        """
        if not is_integral(length) or not 0 <= length <= LONGEST_CONTEXT:
            raise ValueError(
                f"context_length must be an int from 1 to {LONGEST_CONTEXT}, got {shown(length)}"
            )
        positions = peft_helper.vllm_max_position_embeddings
        factor = float(math.ceil(length / positions)) if positions else 1.0
        if factor > 1:
            peft_helper.beside["scaling_factor"] = factor

    def check_config(
        self, length: Any, peft_helper: PEFTHelper, lora_config: LoRAConfig
    ) -> list[NeedsOption]:
        """What is wrong with a config whose factor the engine was not started with."""
        factor = peft_helper.beside.get("scaling_factor", 1.0)
        factors = lora_config.long_lora_scaling_factors or ()
        if factor == 1 or factor in factors:
            return []
        enough = (*factors, factor)
        sentence = (
            f"context_length {length} needs rotary factor {factor}, but long_lora_scaling_factors has "
            f"{list(factors) or 'none'}; pass --long-lora-scaling-factors {','.join(map(str, enough))}."
        )
        return [NeedsOption(sentence, long_lora_scaling_factors=enough)]

    def wrap_model(
        self, model: nn.Module, wrapped: WrappedModules, lora_config: LoRAConfig
    ) -> "StretchedRotaries | None":
        """Wrap the model's rotary tables, if adapters may have factors."""
        rotaries: list[LinearScalingRotaryEmbeddingWithLoRA] = []
        factors = lora_config.long_lora_scaling_factors
        for name, layer in list(model.named_modules()) if factors else []:
            if isinstance(layer, RotaryEmbedding):
                rotary = LinearScalingRotaryEmbeddingWithLoRA(layer, factors, lora_config.max_loras)
                rotary.set_mapping(wrapped.backend)
                rotaries.append(replace_submodule(model, name, rotary))
        return StretchedRotaries(rotaries) if rotaries else None


class StretchedRotaries(WrappedOption):
    """A model's wrapped rotary tables, which follow the slots."""

    follows_slots = True

    def __init__(self, rotaries: "list[LinearScalingRotaryEmbeddingWithLoRA]") -> None:
        self.rotaries = rotaries

    @property
    def tables(self) -> list[torch.Tensor]:
        return [table for rotary in self.rotaries for table in rotary.tables]

    def before_step(self, in_slots: list[LoRAModel | None]) -> None:
        for rotary in self.rotaries:
            rotary.set_factors([lora.beside.get("scaling_factor", 1.0) if lora else 1.0 for lora in in_slots])


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
        self.backend: Backend | None = None

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """What it has allocated beside the base model's table."""
        return self.cos, self.sin, self.starts

    def set_mapping(self, punica_wrapper: Backend) -> None:
        """Hand over the backend that knows the slot of every row."""
        self.backend = punica_wrapper

    def set_factors(self, slot_factors: list[float]) -> None:
        """Take in the factor of the adapter in each slot, (S,) of `factors`; 1 for a free one."""
        if slot_factors != self._slot_factors:
            starts = torch.tensor([self._start_of[factor] for factor in (*slot_factors, 1.0)])
            self._slot_factors = []  # until the copy has come to its end, nobody knows what is there
            self.starts.copy_(starts, non_blocking=True)
            self._slot_factors = list(slot_factors)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (T,) int64 -> cos, sin: (T, 1, D), each row by its adapter's table"""
        if self.backend.no_lora:
            return self.base_layer(positions)
        shifted = positions + self.starts[self.backend.token_slots(len(positions))]  # (T,)
        return self.cos[shifted], self.sin[shifted]
