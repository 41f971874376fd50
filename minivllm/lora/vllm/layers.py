"""What vLLM has in vllm/lora/layers/ (v0.22.1) and the core has elsewhere, or not at all."""

from minivllm.lora.options.embedding import VocabParallelEmbeddingWithLoRA
from minivllm.lora.options.experts import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from minivllm.lora.options.logits import LogitsProcessorWithLoRA
from minivllm.lora.options.long_context import LinearScalingRotaryEmbeddingWithLoRA
from minivllm.lora.vllm.sharded import (
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
    RowParallelLinearWithShardedLoRA,
)

__all__ = [
    "ColumnParallelLinearWithShardedLoRA",
    "FusedMoE3DWithLoRA",
    "FusedMoEWithLoRA",
    "LinearScalingRotaryEmbeddingWithLoRA",
    "LogitsProcessorWithLoRA",
    "MergedColumnParallelLinearWithShardedLoRA",
    "MergedQKVParallelLinearWithShardedLoRA",
    "QKVParallelLinearWithShardedLoRA",
    "RowParallelLinearWithShardedLoRA",
    "VocabParallelEmbeddingWithLoRA",
]
