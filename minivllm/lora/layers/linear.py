"""One wrapper for each kind of base linear.

Stands for vllm/lora/layers/column_parallel_linear.py, row_parallel_linear.py and replicated_linear.py (v0.22.1).
"""

from typing import ClassVar

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.lora.layers.base import BaseLinearLayerWithLoRA


class ColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """A plain linear, or a fused one that the checkpoint stores as one matrix. vLLM: the same name."""

    wraps: ClassVar = {ColumnParallelLinear: None, MergedColumnParallelLinear: 1}

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """A fused one of three slices or more is the variable-slice wrapper's."""
        is_wide = len(getattr(source_layer, "output_sizes", ())) >= 3
        return not is_wide and super().can_replace_layer(
            source_layer, lora_config, packed_modules_list, model_config
        )


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """The linear back to the model's width: o_proj, down_proj. vLLM: the same name."""

    wraps: ClassVar = {RowParallelLinear: None}


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    """A linear that tensor parallelism would not split. vLLM: the same name."""

    wraps: ClassVar = {ReplicatedLinear: None}

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """A model's own kind of it, too, such as a router: its forward pass is called, whatever it computes."""
        return isinstance(source_layer, ReplicatedLinear)


class MergedColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """gate_proj and up_proj in one, with two adapters. vLLM: the same name."""

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """A model's own kind of it, too: its forward pass is called, whatever it computes."""
        is_merged = isinstance(source_layer, MergedColumnParallelLinear)
        return is_merged and len(packed_modules_list) == len(source_layer.output_sizes) == 2

    def _slice_widths(self, base_layer: MergedColumnParallelLinear) -> tuple[int, ...]:
        return tuple(base_layer.output_sizes)


class MergedQKVParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """q, k and v in one, with three adapters. vLLM: the same name."""

    wraps: ClassVar = {QKVParallelLinear: 3}


class QKVParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    """q, k and v in one, with one adapter over all three: the checkpoint is fused, too. vLLM: the same name."""

    wraps: ClassVar = {QKVParallelLinear: 1}


class MergedColumnParallelLinearVariableSliceWithLoRA(MergedColumnParallelLinearWithLoRA):
    """Three or more linears in one, with an adapter for each or one for all. vLLM: the same name.

    An adapter for all has one A, which every slice then gets, and a B that is as tall as the layer.
    """

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """A merged linear of three slices or more, unless its checkpoint names two parts."""
        is_wide = type(source_layer) is MergedColumnParallelLinear and len(source_layer.output_sizes) >= 3
        return is_wide and len(packed_modules_list) in (0, 1, len(source_layer.output_sizes))

    def slice_lora_a(self, lora_a: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return lora_a * self.n_slices if len(lora_a) == 1 else lora_a

    def slice_lora_b(self, lora_b: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return self._taken_apart(lora_b, dim=0)

    def slice_extras(self, extras: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return self._taken_apart(extras, dim=1)

    def _taken_apart(self, tensors: list[torch.Tensor | None], dim: int) -> list[torch.Tensor | None]:
        """One for all of the layer as one for each slice, along the dimension of the outputs."""
        if len(tensors) > 1:
            return tensors
        whole = tensors[0]
        return [None] * self.n_slices if whole is None else list(whole.split(self.output_slices, dim))


class _FullySharded:
    """Taken instead of the plain class where `fully_sharded_loras` is on. S-LoRA, https://arxiv.org/abs/2311.03285.

    Ranks would share out A as well, or, after a row-parallel linear, B. There is one rank: it has all of both.
    """

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        return lora_config.fully_sharded_loras and super().can_replace_layer(
            source_layer, lora_config, packed_modules_list, model_config
        )


class ColumnParallelLinearWithShardedLoRA(_FullySharded, ColumnParallelLinearWithLoRA):
    """vLLM: the same name."""


class RowParallelLinearWithShardedLoRA(_FullySharded, RowParallelLinearWithLoRA):
    """vLLM: the same name."""


class MergedColumnParallelLinearWithShardedLoRA(_FullySharded, MergedColumnParallelLinearWithLoRA):
    """vLLM: the same name."""


class MergedQKVParallelLinearWithShardedLoRA(_FullySharded, MergedQKVParallelLinearWithLoRA):
    """vLLM: the same name."""


class QKVParallelLinearWithShardedLoRA(_FullySharded, QKVParallelLinearWithLoRA):
    """vLLM: the same name."""
