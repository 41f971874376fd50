"""What of a model may be adapted, and what the server wants adapted.

Stands for get_supported_lora_modules in vllm/lora/utils.py and parts of vllm/lora/model_manager.py (v0.22.1).
"""

from typing import Any

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import LinearBase
from minivllm.lora.layers.base import BaseLayerWithLoRA
from minivllm.lora.names import is_in_target_modules
from minivllm.lora.replace import from_layer
from minivllm.lora.seams import wrappers


def plugged_wrapper(model: nn.Module, name: str, layer: nn.Module) -> Any:
    """The option's wrapper that takes a layer which is no plain linear."""
    if is_plain(layer):
        return None
    return next((w for w in wrappers if w.parts_in(model, name, layer) is not None), None)


def is_plain(layer: nn.Module) -> bool:
    """Whether it is a linear inside the model."""
    return isinstance(layer, LinearBase) and not layer.is_head


def layers_to_wrap(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every layer that may be adapted -> all names it can be reached by: linears, and what options find."""
    names_of: dict[nn.Module, list[str]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if is_plain(layer) or plugged_wrapper(model, name, layer) is not None:
            names_of.setdefault(layer, []).append(name)
    return names_of


def get_supported_lora_modules(model: nn.Module) -> list[str]:
    """Ends of the names of every layer that adapters may target. vLLM: the same name."""
    return sorted({name.rpartition(".")[2] for names in layers_to_wrap(model).values() for name in names})


def process_packed_modules_mapping(model: nn.Module) -> dict[str, list[str]]:
    """Ends of the names of fused modules -> those of their parts, in order. vLLM: the same name."""
    mapping = dict(getattr(model, "packed_modules_mapping", {}))
    for layer, (name, *_) in layers_to_wrap(model).items():
        plugged = plugged_wrapper(model, name, layer)
        if plugged and (parts := plugged.parts_in(model, name, layer)):
            mapping[name.rpartition(".")[2]] = parts
    return mapping


def refuse_targets(
    model: nn.Module,
    layers: dict[nn.Module, list[str]],
    target_modules: list[str] | None,
    packed_mapping: dict[str, list[str]],
) -> None:
    """ValueError unless everything that `target_modules` names is there and may be adapted.

    A typing error would otherwise adapt nothing, and a module of torch's own be left alone in silence. Also where
    there is nothing to adapt at all.
    """
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer that LoRA could be applied to")
    names = {name for of_layer in layers.values() for name in of_layer}
    for target in target_modules or []:
        if not any(is_in_target_modules(name, [target], packed_mapping) for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(f"target_modules names '{target}', but the model has only {', '.join(known)}")
    ends = {name.rpartition(".")[2] for name in names}
    for name, module in model.named_modules() if target_modules is not None else ():
        is_unknown = name not in names and name.rpartition(".")[2] in ends
        if is_unknown and is_in_target_modules(name, target_modules, packed_mapping):
            raise ValueError(
                f"{name} ({type(module).__name__}) cannot be wrapped for LoRA, but target_modules names it"
            )


def wrapped_layer(
    model: nn.Module, name: str, layer: nn.Module, lora_config: LoRAConfig, parts: list[str]
) -> BaseLayerWithLoRA:
    """A model's layer wrapped, with empty slots. ValueError where no wrapper takes it."""
    if plugged := plugged_wrapper(model, name, layer):
        return plugged.around(model, name, layer, lora_config.max_loras, lora_config)
    wrapped = from_layer(layer, lora_config.max_loras, lora_config, parts)
    if not isinstance(wrapped, BaseLayerWithLoRA):
        raise ValueError(f"{name} ({type(layer).__name__}) cannot be wrapped for LoRA")
    return wrapped
