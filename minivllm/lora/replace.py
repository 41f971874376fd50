"""Wrapping a model's layers. Stands for the module functions of vllm/lora/utils.py (v0.22.1)."""

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.linear import LinearBase
from minivllm.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    ColumnParallelLinearWithShardedLoRA,
    FusedMoE3DWithLoRA,
    FusedMoEWithLoRA,
    LogitsProcessorWithLoRA,
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
    VocabParallelEmbeddingWithLoRA,
)

# The first that takes a layer has it.
_ALL_LORA_CLASSES: tuple[type[BaseLayerWithLoRA], ...] = (
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    RowParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
    FusedMoEWithLoRA,
    FusedMoE3DWithLoRA,
)


# region lab 2.4: the right wrapper for a layer
def from_layer(
    layer: nn.Module,
    max_loras: int,
    lora_config: LoRAConfig,
    packed_modules_list: list[str],
    model_config: object | None = None,
) -> nn.Module:
    """The layer wrapped, with empty slots; or the layer itself where no wrapper takes it. vLLM: `from_layer`.

    max_loras             how many slots
    packed_modules_list   the parts of the layer that the checkpoint names one by one, [] for one that is not fused

    It is the first of `_ALL_LORA_CLASSES` that takes the layer, which its `can_replace_layer` tells.
    """
    for wrapper in _ALL_LORA_CLASSES:
        if wrapper.can_replace_layer(layer, lora_config, packed_modules_list, model_config):
            wrapped = wrapper(layer)
            wrapped.create_lora_weights(max_loras, lora_config, model_config)
            return wrapped
    return layer


# endregion


def from_layer_logits_processor(
    layer: LogitsProcessor,
    lm_head: ParallelLMHead,
    max_loras: int,
    lora_config: LoRAConfig,
    model_config: object | None = None,
) -> LogitsProcessorWithLoRA:
    """The logits processor wrapped, with empty slots for adapters on `lm_head`. vLLM: the same name."""
    weight = lm_head.weight
    wrapped = LogitsProcessorWithLoRA(layer, lm_head.embedding_dim, weight.dtype, weight.device, None)
    wrapped.create_lora_weights(max_loras, lora_config, model_config)
    return wrapped


def replace_submodule(model: nn.Module, module_name: str, new_module: nn.Module) -> nn.Module:
    """Put `new_module` where `module_name` is, and give it back. vLLM: the same name."""
    parent_name, _, child = module_name.rpartition(".")
    setattr(model.get_submodule(parent_name), child, new_module)
    return new_module


def get_supported_lora_modules(model: nn.Module) -> list[str]:
    """Ends of the names of every layer that adapters may target. vLLM: the same name."""
    return sorted({name.rpartition(".")[2] for names in layers_to_wrap(model).values() for name in names})


def layers_to_wrap(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every layer that may be adapted -> all names it can be reached by.

    Linears, experts, and those embeddings that the model's `embedding_modules` lists.
    """
    embeddings = getattr(model, "embedding_modules", {})
    names_of: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        is_embedding = isinstance(module, VocabParallelEmbedding | ParallelLMHead)
        if is_embedding and name.rpartition(".")[2] not in embeddings:
            continue
        if is_embedding or isinstance(module, LinearBase | FusedMoE):
            names_of.setdefault(module, []).append(name)
    return names_of
