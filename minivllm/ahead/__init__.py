"""One step of lookahead: a step is launched before the tokens of the one before are read. vLLM: async scheduling.

Brings      on an H100, Llama-8B shape in bfloat16, decoding the base model: 168 instead of 157 tokens a second for 1
            request, 5,091 instead of 4,438 for 32, 16,494 instead of 12,535 for 128 (benchmarks/README.md,
            engine-decode-ahead-h100-2026-11-22.json and engine-decode-waiting-h100-2026-11-22.json)
Implements  `EngineCore`: `LookaheadCore` overrides a step and the check of a request
Options     `async_scheduling`; without it, and where most steps are no CUDA graphs, the core waits as it is
Costs       some 240 lines. A request that ends by a token, and not by its length, has one row too many in the step
            after. No memory, and no seconds at the start
"""

from typing import TYPE_CHECKING

from minivllm.engine.core import EngineCore
from minivllm.extension import Extension
from minivllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from minivllm.parts import Parts


def _core_class(runner: ModelRunner) -> type[EngineCore]:
    if not runner.graphs.hold_most_steps:
        return EngineCore
    from minivllm.ahead.lookahead import LookaheadCore

    return LookaheadCore


def _add_to(parts: "Parts") -> None:
    if parts.config.scheduler_config.async_scheduling:
        parts.core_class = _core_class


AHEAD = Extension(add_to=_add_to)
