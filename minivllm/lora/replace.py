"""Wrapping a model's layers. Stands for the module functions of vllm/lora/utils.py (v0.22.1)."""

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import LinearBase
from minivllm.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)

_ALL_LORA_CLASSES: tuple[type[BaseLayerWithLoRA], ...] = (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
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

    At most one of `_ALL_LORA_CLASSES` takes a layer, which its `can_replace_layer` tells.
    """
    for wrapper in _ALL_LORA_CLASSES:
        if wrapper.can_replace_layer(layer, lora_config, packed_modules_list, model_config):
            wrapped = wrapper(layer)
            wrapped.create_lora_weights(max_loras, lora_config, model_config)
            return wrapped
    return layer


# endregion


def replace_submodule(model: nn.Module, module_name: str, new_module: nn.Module) -> nn.Module:
    """Put `new_module` where `module_name` is, and give it back. vLLM: the same name."""
    parent_name, _, child = module_name.rpartition(".")
    setattr(model.get_submodule(parent_name), child, new_module)
    return new_module


def get_supported_lora_modules(model: nn.Module) -> list[str]:
    """Ends of the names of every linear in the model: what adapters may target. vLLM: the same name."""
    linears = {
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LinearBase)
    }
    return sorted(linears - getattr(model, "embedding_modules", {}).keys())
