"""What vLLM has in vllm/lora/layers/ (v0.22.1), with its names for what a layer does."""

from minivllm.lora.layers.base import BaseLayerWithLoRA, BaseLinearLayerWithLoRA
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
from minivllm.options.embedding import VocabParallelEmbeddingWithLoRA
from minivllm.options.experts import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from minivllm.options.fully_sharded import (
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
    RowParallelLinearWithShardedLoRA,
)
from minivllm.options.legacy.long_context import LinearScalingRotaryEmbeddingWithLoRA
from minivllm.options.logits import LogitsProcessorWithLoRA

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
