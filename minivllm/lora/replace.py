"""Wrapping a model's layers. Stands for the module functions of vllm/lora/utils.py (v0.22.1)."""

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.extensions import PLAIN, LoRAExtensions
from minivllm.lora.layers.linear import LINEAR_WRAPPERS


def from_layer(
    layer: nn.Module,
    max_loras: int,
    lora_config: LoRAConfig,
    packed_modules_list: list[str],
    model_config: object | None = None,
    *,
    extensions: LoRAExtensions = PLAIN,
) -> nn.Module:
    """The layer wrapped, with empty slots; or the layer itself where no wrapper fits. vLLM: `from_layer`.

    max_loras             how many slots
    packed_modules_list   the parts of the layer that the checkpoint names one by one, [] for one that is not fused

    `LINEAR_WRAPPERS` are asked first, then those of options. The first that can wrap it does; `takes` says so, told how
    many parts there are.
    """
    for wrapper in (*LINEAR_WRAPPERS, *extensions.wrappers):
        if wrapper.takes(layer, len(packed_modules_list)):
            wrapped = extensions.wrapper_for(wrapper, lora_config)(layer)
            wrapped.create_lora_weights(max_loras, lora_config)
            return wrapped
    return layer


def replace_submodule(model: nn.Module, module_name: str, new_module: nn.Module) -> nn.Module:
    """Put `new_module` where `module_name` is, and give it back. vLLM: the same name."""
    model.set_submodule(module_name, new_module)
    return new_module
