"""What vLLM's tests call on a wrapped layer. Stands for half of vllm/lora/layers/base_linear.py (v0.22.1)."""

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.backend import Backend
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.slots import Slots


class VllmNames:
    """vLLM's names for what a wrapped layer does under its own. Nothing inside calls them."""

    slots: Slots
    backend: Backend | None

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        return cls.takes(source_layer, len(packed_modules_list))

    def set_lora(self, index: int, lora_a: object, lora_b: object) -> None:
        """`write`, of A (r, K) and B (N_i, r), or lists of n, None where a slice has no adapter."""
        sides = self.slice_lora_a(as_list(lora_a)), self.slice_lora_b(as_list(lora_b))
        parts = [
            None if a is None or b is None else LoRALayerWeights("", a.shape[-2], 1, a, b, 1)
            for a, b in zip(*sides, strict=True)
        ]
        self.write(index, PackedLoRALayerWeights.from_parts("", 0, parts))

    def reset_lora(self, index: int) -> None:
        self.clear(index)

    def slice_lora_a(self, lora_a: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """This tensor-parallel rank's part of each A: all of it, since there is one rank."""
        return lora_a

    def slice_lora_b(self, lora_b: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """This tensor-parallel rank's part of each B: all of it, since there is one rank."""
        return lora_b

    @property
    def lora_a_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.slots.a

    @property
    def lora_b_stacked(self) -> tuple[torch.Tensor, ...]:
        return self.slots.b

    @property
    def punica_wrapper(self) -> Backend | None:
        return self.backend


def as_list(weights: object) -> list[torch.Tensor | None]:
    """One entry a slice."""
    return weights if isinstance(weights, list) else [weights]
