"""One wrapper for each kind of base linear.

Stands for vllm/lora/layers/column_parallel_linear.py, row_parallel_linear.py and replicated_linear.py (v0.22.1).
"""

from typing import ClassVar

from torch import nn

from minivllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.lora.layers.base import BaseLinearLayerWithLoRA, Sides, as_list


class ColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """A plain linear, or a fused one that the checkpoint stores as one matrix. vLLM: the same name."""

    wraps: ClassVar = {ColumnParallelLinear: None, MergedColumnParallelLinear: 1}

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        """A fused one of three slices or more is the variable-slice wrapper's."""
        return len(getattr(layer, "output_sizes", ())) < 3 and super().takes(layer, parts)


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """The linear back to the model's width: o_proj, down_proj. vLLM: the same name."""

    wraps: ClassVar = {RowParallelLinear: None}


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    """A linear that tensor parallelism would not split. vLLM: the same name."""

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        """A model's own kind of it, too, such as a router: its forward pass is called, whatever it computes."""
        return isinstance(layer, ReplicatedLinear)


class QKVParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """q, k and v in one, with one adapter over all three: the checkpoint is fused, too. vLLM: the same name."""

    wraps: ClassVar = {QKVParallelLinear: 1}


class MergedColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """gate_proj and up_proj in one, with two adapters. vLLM: the same name."""

    wraps: ClassVar = {MergedColumnParallelLinear: 2}

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        return _names_every_slice(cls.wraps, layer, parts)


class MergedQKVParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """q, k and v in one, with three adapters. vLLM: the same name."""

    wraps: ClassVar = {QKVParallelLinear: 3}

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        return _names_every_slice(cls.wraps, layer, parts)


class MergedColumnParallelLinearVariableSliceWithLoRA(MergedColumnParallelLinearWithLoRA):
    """Three or more linears in one, with an adapter for each or one for all. vLLM: the same name.

    An adapter for all has one A, which every slice gets. Its B is as tall as the layer.
    """

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        """A merged linear of three slices or more, a model's own kind too, unless its checkpoint names two parts."""
        is_wide = isinstance(layer, MergedColumnParallelLinear) and len(layer.output_sizes) >= 3
        return is_wide and parts in (0, 1, len(layer.output_sizes))

    def slice_lora_a(self, lora_a: Sides) -> Sides:
        """As in the parent class; an A for all of the layer once for each slice."""
        lora_a = as_list(lora_a)
        return super().slice_lora_a(lora_a * self.n_slices if len(lora_a) == 1 else lora_a)

    def slice_lora_b(self, lora_b: Sides) -> Sides:
        """As in the parent class; a B for all of the layer as one for each slice."""
        lora_b = as_list(lora_b)
        if len(lora_b) == 1:
            heights = [height for _, height in self.slice_sizes]
            lora_b = [None] * self.n_slices if lora_b[0] is None else list(lora_b[0].split(heights))
        return super().slice_lora_b(lora_b)


def _names_every_slice(wraps: dict[type[LinearBase], int | None], layer: nn.Module, parts: int) -> bool:
    """Whether a checkpoint names as many parts as there are slices, and as `wraps` asks for.

    Of a model's own kind, too: its forward pass is called, whatever it computes.
    """
    kinds = wraps.items()
    return any(isinstance(layer, kind) and parts == n == len(layer.output_sizes) for kind, n in kinds)
