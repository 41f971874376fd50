"""Wrapped layers: a base layer each, with slots for adapters."""

from minivllm.lora.layers.base import BaseLayerWithLoRA, BaseLinearLayerWithLoRA
from minivllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from minivllm.lora.layers.linear import (
    ColumnParallelLinearWithLoRA,
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA,
    QKVParallelLinearWithShardedLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    RowParallelLinearWithShardedLoRA,
)
from minivllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from minivllm.lora.layers.rotary import LinearScalingRotaryEmbeddingWithLoRA
from minivllm.lora.layers.utils import LoRAMapping, LoRAMappingType
from minivllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA

__all__ = [
    "BaseLayerWithLoRA",
    "BaseLinearLayerWithLoRA",
    "ColumnParallelLinearWithLoRA",
    "ColumnParallelLinearWithShardedLoRA",
    "FusedMoE3DWithLoRA",
    "FusedMoEWithLoRA",
    "LinearScalingRotaryEmbeddingWithLoRA",
    "LoRAMapping",
    "LoRAMappingType",
    "LogitsProcessorWithLoRA",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithShardedLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithShardedLoRA",
    "QKVParallelLinearWithLoRA",
    "QKVParallelLinearWithShardedLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
    "RowParallelLinearWithShardedLoRA",
    "VocabParallelEmbeddingWithLoRA",
]
