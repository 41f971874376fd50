"""minivllm: multi-LoRA serving as vLLM's V1 engine does it, small enough to read in a weekend."""

import logging
import os
from typing import TYPE_CHECKING, Any

logging.getLogger("minivllm").addHandler(logging.NullHandler())  # where nobody listens, nothing is said

if os.environ.get("MINIVLLM_LABS"):  # before anything else is imported that might be the learner's
    from minivllm.labs import install_from_environment

    install_from_environment()

if TYPE_CHECKING:
    from minivllm.assembly import LLM, LLMEngine
    from minivllm.engine.outputs import CompletionOutput, RequestOutput
    from minivllm.engine_args import EngineArgs
    from minivllm.lora.request import LoRARequest
    from minivllm.sampling_params import SamplingParams
    from minivllm.serving.async_llm import AsyncLLM

# Imported when first asked for: `import minivllm` must not cost what `import torch` costs.
_EXPORTS = {
    "LLM": "minivllm.assembly",
    "AsyncLLM": "minivllm.serving.async_llm",
    "CompletionOutput": "minivllm.engine.outputs",
    "EngineArgs": "minivllm.engine_args",
    "LLMEngine": "minivllm.assembly",
    "LoRARequest": "minivllm.lora.request",
    "RequestOutput": "minivllm.engine.outputs",
    "SamplingParams": "minivllm.sampling_params",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'minivllm' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
