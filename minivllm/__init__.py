"""minivllm: multi-LoRA serving as vLLM's V1 engine does it, small enough to read in a weekend."""

import importlib
import importlib.metadata
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

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


class _StderrHandler(logging.Handler):
    """Writes to stderr for programs that set a level on one of the package's loggers and configured no handler.

    Python alone would drop such records, or print those from WARNING on, which no program asked for.
    """

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger(record.name)
        while logger.name.startswith("minivllm") and not logger.level:
            logger = logger.parent
        if logger.name.startswith("minivllm") and not logging.root.handlers:
            print(self.format(record), file=sys.stderr)


logging.getLogger("minivllm").addHandler(_StderrHandler())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("minivllm")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'minivllm' has no attribute '{name}'")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


# Modules to import before any other of this package, here and in all processes of an engine, which inherit
# this: what they register is there from the beginning. vLLM: entry points of the group vllm.general_plugins.
for _plugin in filter(None, os.environ.get("MINIVLLM_PLUGINS", "").split(",")):
    importlib.import_module(_plugin)
