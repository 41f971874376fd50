"""Names and module replacement under vLLM's one name for both. Stands for vllm/lora/utils.py (v0.22.1)."""

from torch import nn

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.config import LoRAConfig
from minivllm.lora import names, wrapping
from minivllm.lora.names import is_left_out, parse_fine_tuned_lora_name
from minivllm.lora.wrapping import adaptable, ends_of, replace_submodule
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


def from_layer(
    layer: nn.Module,
    max_loras: int,
    lora_config: LoRAConfig,
    packed_modules_list: list[str],
    model_config: object | None = None,
) -> nn.Module:
    """The layer wrapped, be it a linear, an embedding or experts; or the layer itself. vLLM: the same name."""
    return wrapping.from_layer(
        layer, max_loras, lora_config, packed_modules_list, model_config, extensions=LORA_EXTENSIONS
    )


def is_in_target_modules(
    module_name: str,
    target_modules: list[str] | None,
    packed_modules_mapping: dict[str, list[str]] | None = None,
) -> bool:
    """Whether the server's `target_modules` lets this module be wrapped; None lets all. vLLM: the same name."""
    part_names = LORA_EXTENSIONS.part_names
    return names.is_in_target_modules(module_name, target_modules, packed_modules_mapping, part_names)


def get_adapter_absolute_path(lora_path: str) -> str:
    """The local folder of an adapter's path, which may be a hub id. vLLM: the same name."""
    return names.get_adapter_absolute_path(lora_path, LORA_EXTENSIONS.folder_sources)


def get_supported_lora_modules(model: nn.Module) -> list[str]:
    """Ends of the names of every layer that adapters may target. vLLM: the same name."""
    return ends_of(adaptable(model, LORA_EXTENSIONS)[0])


def process_packed_modules_mapping(model: nn.Module) -> dict[str, list[str]]:
    """Ends of the names of fused modules -> those of their parts, in order. vLLM: the same name."""
    return adaptable(model, LORA_EXTENSIONS)[1]


def is_base_embedding_weights(name: str) -> bool:
    """Whether PEFT saved this tensor, of the base model, beside an adapted embedding. vLLM: the same name."""
    return is_left_out(name)


def is_supported_lora_module(module_name: str, supported_lora_modules: list[str]) -> bool:
    """Whether a module's name is, or ends in, one of the supported names. vLLM: the same name."""
    return any(f".{module_name}".endswith(f".{end}") for end in supported_lora_modules)
