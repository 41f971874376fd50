"""vLLM's managers, for adapters with all options. Stands for vllm/lora/model_manager.py (v0.22.1)."""

from typing import Any

from minivllm.assembly import LORA_EXTENSIONS
from minivllm.lora import model_manager
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

__all__ = [
    "DEFAULT_LANGUAGE_WRAPPER_KEY",
    "LRUCacheLoRAModelManager",
    "LoRAMapping",
    "LoRAModelManager",
    "create_lora_manager",
]


class LRUCacheLoRAModelManager(model_manager.LRUCacheLoRAModelManager):
    """vLLM: the same name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"extensions": LORA_EXTENSIONS, **options})


class LoRAModelManager(model_manager.LoRAModelManager):
    """vLLM: the same name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"extensions": LORA_EXTENSIONS, **options})


def create_lora_manager(*args: Any, **options: Any) -> model_manager.LRUCacheLoRAModelManager:
    """A manager for a model, which it wraps; parameters as of the core's function. vLLM: the same name."""
    defaults = {"lora_manager_cls": LoRAModelManager, "extensions": LORA_EXTENSIONS}
    return model_manager.create_lora_manager(*args, **{**defaults, **options})
