"""What of a model may be adapted, and what the server wants adapted.

Stands for get_supported_lora_modules in vllm/lora/utils.py and parts of vllm/lora/model_manager.py (v0.22.1).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from minivllm.layers.linear import LinearBase
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.names import is_in_target_modules

Layers = dict[nn.Module, list[str]]  # layer -> all names it can be reached by


def adaptable(model: nn.Module, extensions: LoRAExtensions) -> tuple[Layers, dict[str, list[str]]]:
    """Every layer that may be adapted, and ends of the names of fused ones -> those of their parts, in order.

    Adaptable are linears inside the model, and what options find.
    """
    layers: Layers = {}
    packed = dict(getattr(model, "packed_modules_mapping", {}))
    for name, layer in model.named_modules(remove_duplicate=False):
        plugged = plugged_wrapper(model, name, layer, extensions)
        if plugged or is_plain(layer):
            layers.setdefault(layer, []).append(name)
        if plugged and (parts := plugged.parts_in(model, name, layer)):
            packed[end_of(name)] = parts
    return layers, packed


def is_plain(layer: nn.Module) -> bool:
    """Whether it is a linear inside the model."""
    return isinstance(layer, LinearBase) and not layer.is_head


def plugged_wrapper(model: nn.Module, name: str, layer: nn.Module, extensions: LoRAExtensions) -> Any:
    """The option's wrapper for a layer that is no plain linear; None if there is none."""
    if is_plain(layer):
        return None
    return next((w for w in extensions.wrappers if w.parts_in(model, name, layer) is not None), None)


def end_of(name: str) -> str:
    """The last part of a module's name."""
    return name.rpartition(".")[2]


def ends_of(layers: Layers) -> list[str]:
    """Ends of the names of all layers, sorted."""
    return sorted({end_of(name) for names in layers.values() for name in names})


def refuse_targets(
    model: nn.Module,
    layers: Layers,
    target_modules: list[str] | None,
    packed: dict[str, list[str]],
    part_names: Mapping[str, Sequence[str]],
) -> None:
    """ValueError unless everything that `target_modules` names is there and may be adapted.

    Else a typing error would adapt nothing, and a module of torch's own would be left alone in silence. It is a
    ValueError, too, where there is nothing to adapt at all.
    """
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer that LoRA could be applied to")
    names, ends = {name for of_layer in layers.values() for name in of_layer}, ends_of(layers)
    for target in target_modules or []:
        if not any(is_in_target_modules(name, [target], packed, part_names) for name in names):
            raise ValueError(f"target_modules names '{target}', but the model has only {', '.join(ends)}")
    for name, module in model.named_modules() if target_modules is not None else ():
        is_unknown = name not in names and end_of(name) in ends
        if is_unknown and is_in_target_modules(name, target_modules, packed, part_names):
            raise ValueError(
                f"{name} ({type(module).__name__}) cannot be wrapped for LoRA, but target_modules names it"
            )
