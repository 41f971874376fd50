"""Names and module replacement under vLLM's one name for both. Stands for vllm/lora/utils.py (v0.22.1)."""

from minivllm.lora.expert_parts import process_packed_modules_mapping
from minivllm.lora.names import (
    get_adapter_absolute_path,
    is_base_embedding_weights,
    is_in_target_modules,
    is_supported_lora_module,
    parse_fine_tuned_lora_name,
)
from minivllm.lora.replace import (
    from_layer,
    from_layer_logits_processor,
    get_supported_lora_modules,
    replace_submodule,
)

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
