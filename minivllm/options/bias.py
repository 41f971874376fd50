"""A bias on B (PEFT's `lora_bias`). Stands for `bias_enabled` of vllm/lora/layers (v0.8.5)."""

from typing import Any

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import RowParallelLinear
from minivllm.lora.layers.base import BaseLayerWithLoRA, BaseLinearLayerWithLoRA
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.wrapped_modules import WrappedModules

BIAS = "bias"


def make_room(model: nn.Module, wrapped: WrappedModules, lora_config: LoRAConfig) -> None:
    """Where adapters may have biases: n tables (S, 1, N_i) in the slots of every linear, added after its product."""
    if not lora_config.bias_enabled:
        return
    for layer in wrapped.modules.values():
        if isinstance(layer, BaseLinearLayerWithLoRA):
            count, dtype, device = len(layer.slots.b[0]), layer.slots.b[0].dtype, layer.weight.device
            tables = (
                torch.zeros(count, 1, width, dtype=dtype, device=device) for width in layer.output_slices
            )
            layer.slots.beside[BIAS] = tuple(tables)
            layer.register_forward_hook(add_bias)


def add_bias(
    layer: BaseLinearLayerWithLoRA, inputs: Any, output: tuple[torch.Tensor, None]
) -> tuple[torch.Tensor, None]:
    """y[:, slice i] += each row's own bias, in place; of terms that ranks sum, rank 0's alone.   y: (T, N)"""
    y, backend = output[0], layer.backend
    if isinstance(layer.base_layer, RowParallelLinear) and layer.base_layer.tp.rank:
        return output
    if not backend.no_lora:
        slots = backend.token_slots(len(y))[:, None]  # (T, 1)
        for columns, bias in zip(y.split(layer.output_slices, dim=1), layer.slots.beside[BIAS]):
            own = bias[slots[:, 0].clamp(min=0), 0]  # (T, N_i)
            columns += own.masked_fill(slots < 0, 0).to(y.dtype)
    return output


def refuse_bias(layer: BaseLayerWithLoRA, weights: LoRALayerWeights) -> None:
    """ValueError where a layer has no room for the bias that an adapter brings."""
    name = weights.module_name
    if not isinstance(layer, BaseLinearLayerWithLoRA):
        raise ValueError(
            f"{name} has a bias on B (lora_bias), which embeddings and experts cannot have; train without"
        )
    if BIAS not in layer.slots.beside:
        raise ValueError(f"{name} has a bias on B (lora_bias); pass --enable-lora-bias")
