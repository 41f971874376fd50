"""What vLLM's tests call on a wrapped layer. Stands for half of vllm/lora/layers/base_linear.py (v0.22.1).

Importing this puts the names on the core's classes.
"""

from operator import attrgetter

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.backend import Backend
from minivllm.lora.layers.base import BaseLayerWithLoRA
from minivllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from minivllm.lora.layers.linear import MergedColumnParallelLinearVariableSliceWithLoRA
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

Sides = list[torch.Tensor | None]  # A or B of each slice, None where it has no adapter


def can_replace_layer(
    cls: type[BaseLayerWithLoRA],
    source_layer: nn.Module,
    lora_config: LoRAConfig,
    packed_modules_list: list[str],
    model_config: object | None = None,
) -> bool:
    return cls.takes(source_layer, len(packed_modules_list))


def set_lora(self: BaseLayerWithLoRA, index: int, lora_a: object, lora_b: object) -> None:
    """`write`, of A (r, K) and B (N_i, r), or lists of n, None where a slice has no adapter."""
    sides = self.slice_lora_a(as_list(lora_a)), self.slice_lora_b(as_list(lora_b))
    parts = [
        None if a is None or b is None else LoRALayerWeights("", a.shape[-2], 1, a, b, 1)
        for a, b in zip(*sides, strict=True)
    ]
    self.write(index, PackedLoRALayerWeights.from_parts("", 0, parts))


def reset_lora(self: BaseLayerWithLoRA, index: int) -> None:
    self.clear(index)


def slice_lora_a(self: BaseLayerWithLoRA, lora_a: Sides | torch.Tensor) -> Sides | torch.Tensor:
    """This tensor-parallel rank's part of each A; of one A for a layer of one slice, as it came."""
    if not isinstance(lora_a, list):
        return self.share.of_a(0, lora_a)
    return [None if a is None else self.share.of_a(i, a) for i, a in enumerate(lora_a)]


def slice_lora_b(self: BaseLayerWithLoRA, lora_b: Sides | torch.Tensor) -> Sides | torch.Tensor:
    """This tensor-parallel rank's part of each B, likewise."""
    if not isinstance(lora_b, list):
        return self.share.of_b(0, lora_b)
    return [None if b is None else self.share.of_b(i, b) for i, b in enumerate(lora_b)]


def share_lora_a(self: MergedColumnParallelLinearVariableSliceWithLoRA, lora_a: Sides) -> Sides:
    """An A for all of the layer once for each slice."""
    lora_a = as_list(lora_a)
    return slice_lora_a(self, lora_a * self.n_slices if len(lora_a) == 1 else lora_a)


def split_lora_b(self: MergedColumnParallelLinearVariableSliceWithLoRA, lora_b: Sides) -> Sides:
    """A B for all of the layer as one for each slice."""
    lora_b = as_list(lora_b)
    if len(lora_b) == 1:
        heights = [height for _, height in self.slice_sizes]
        lora_b = [None] * self.n_slices if lora_b[0] is None else list(lora_b[0].split(heights))
    return slice_lora_b(self, lora_b)


def punica_wrapper(self: BaseLayerWithLoRA) -> Backend | None:
    return self.backend


def as_list(weights: object) -> Sides:
    """One entry a slice."""
    return weights if isinstance(weights, list) else [weights]


for method in (set_lora, reset_lora, slice_lora_a, slice_lora_b):
    setattr(BaseLayerWithLoRA, method.__name__, method)
BaseLayerWithLoRA.punica_wrapper = property(punica_wrapper)
BaseLinearLayerWithLoRA.tp_size = property(attrgetter("base_layer.tp_size"))
BaseLinearLayerWithLoRA.tp_rank = property(attrgetter("base_layer.tp_rank"))
BaseLayerWithLoRA.can_replace_layer = classmethod(can_replace_layer)
MergedColumnParallelLinearVariableSliceWithLoRA.slice_lora_a = share_lora_a
MergedColumnParallelLinearVariableSliceWithLoRA.slice_lora_b = split_lora_b
