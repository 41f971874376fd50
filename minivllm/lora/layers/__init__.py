"""Wrapped layers: a base layer each, with slots for adapters. vLLM's further names are in lora/vllm/layers.py."""

from typing import Any

from minivllm.lora.layers.base import BaseLayerWithLoRA
from minivllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from minivllm.lora.layers.linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from minivllm.lora.mapping import LoRAMapping, LoRAMappingType

__all__ = [
    "BaseLayerWithLoRA",
    "BaseLinearLayerWithLoRA",
    "ColumnParallelLinearWithLoRA",
    "LoRAMapping",
    "LoRAMappingType",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
]


def __getattr__(name: str) -> Any:
    from minivllm.lora.vllm import layers

    return getattr(layers, name)
