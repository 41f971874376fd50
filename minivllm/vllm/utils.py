"""Names and module replacement under vLLM's one name for both. Stands for vllm/lora/utils.py (v0.22.1)."""

from torch import nn

from minivllm.lora.adaptable import adaptable, ends_of
from minivllm.lora.names import (
    get_adapter_absolute_path,
    is_in_target_modules,
    is_left_out,
    parse_fine_tuned_lora_name,
)
from minivllm.lora.replace import from_layer, replace_submodule
from minivllm.options.logits import from_layer_logits_processor

__all__ = [
    "from_layer",
    "from_layer_logits_processor",
    "get_adapter_absolute_path",
    "get_supported_lora_modules",
    "is_base_embedding_weights",
    "is_in_target_modules",
    "is_supported_lora_module",
    "parse_fine_tuned_lora_name",
    "process_packed_modules_mapping",
    "replace_submodule",
]


def get_supported_lora_modules(model: nn.Module) -> list[str]:
    """Ends of the names of every layer that adapters may target. vLLM: the same name."""
    return ends_of(adaptable(model)[0])


def process_packed_modules_mapping(model: nn.Module) -> dict[str, list[str]]:
    """Ends of the names of fused modules -> those of their parts, in order. vLLM: the same name."""
    return adaptable(model)[1]


def is_base_embedding_weights(name: str) -> bool:
    """Whether PEFT saved this tensor, of the base model, beside an adapted embedding. vLLM: the same name."""
    return is_left_out(name)


def is_supported_lora_module(module_name: str, supported_lora_modules: list[str]) -> bool:
    """Whether a module's name is, or ends in, one of the supported names. vLLM: the same name."""
    return any(f".{module_name}".endswith(f".{end}") for end in supported_lora_modules)
