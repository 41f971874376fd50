"""Wrapped layers: a base layer each, with slots for adapters. Stands for vllm/lora/layers/ (v0.22.1)."""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    """vLLM's names of layers, once somebody has imported `minivllm.vllm`."""
    if (facade := sys.modules.get("minivllm.vllm.layers")) is None:
        raise AttributeError(
            f"minivllm.lora.layers has no {name}; `import minivllm.vllm` brings vLLM's names"
        )
    return getattr(facade, name)
