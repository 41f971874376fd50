"""Wrappers for more tensor-parallel ranks than one, of which there is one here: it has all of A and of B.

Stand for the `*WithShardedLoRA` of vllm/lora/layers (v0.22.1). S-LoRA, https://arxiv.org/abs/2311.03285.
"""

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.layers.linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)


class _FullySharded:
    """Taken instead of the plain class where `fully_sharded_loras` is on.

    Ranks would share out A as well, or, after a row-parallel linear, B.
    """

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        return lora_config.fully_sharded_loras and cls.takes(source_layer, len(packed_modules_list))


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


# At most one of them takes a layer.
SHARDED = (
    ColumnParallelLinearWithShardedLoRA,
    RowParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
)
