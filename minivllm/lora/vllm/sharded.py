"""The wrappers that share out all of A and of B, by vLLM's names for what they take.

Stand for the `*WithShardedLoRA` of vllm/lora/layers (v0.22.1).
"""

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from minivllm.lora.options.fully_sharded import (
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
    RowParallelLinearWithShardedLoRA,
)

# At most one of them takes a layer.
SHARDED = (
    ColumnParallelLinearWithShardedLoRA,
    RowParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
)


def can_replace_layer(
    cls: type[BaseLinearLayerWithLoRA],
    source_layer: nn.Module,
    lora_config: LoRAConfig,
    packed_modules_list: list[str],
    model_config: object | None = None,
) -> bool:
    """Where `fully_sharded_loras` is on; the plain class takes the layer otherwise."""
    return lora_config.fully_sharded_loras and cls.takes(source_layer, len(packed_modules_list))


for wrapper in SHARDED:
    wrapper.can_replace_layer = classmethod(can_replace_layer)
