"""vLLM's further names and signatures (v0.22.1, vllm/lora/) over ours. The core knows and uses none of them.

Importing this puts vLLM's names on the core's classes, and has modules of the core find those that vLLM has there.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import minivllm.lora.layers as layers
import minivllm.lora.model_manager as model_manager
import minivllm.lora.vllm.layer_names
import minivllm.lora.vllm.weight_names  # noqa: F401
import minivllm.lora.worker_manager as worker_manager


def names_of(facade: str) -> Callable[[str], Any]:
    """A module's `__getattr__`, which Python asks for names that the module does not have."""

    def find(name: str) -> Any:
        if (
            name == "__path__"
        ):  # `from` asks every module for it; the facade is loaded for a name of vLLM's alone
            raise AttributeError(name)
        return getattr(import_module(f"minivllm.lora.vllm.{facade}"), name)

    return find


model_manager.__getattr__ = worker_manager.__getattr__ = names_of("managers")
layers.__getattr__ = names_of("layers")
