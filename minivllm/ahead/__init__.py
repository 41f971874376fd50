"""One step of lookahead."""

from minivllm.engine.core import EngineCore
from minivllm.engine.extension import Extension, Parts
from minivllm.worker.model_runner import ModelRunner


def _core_class(runner: ModelRunner) -> type[EngineCore]:
    if not runner.graphs.hold_most_steps:
        return EngineCore
    from minivllm.ahead.lookahead import LookaheadCore

    return LookaheadCore


def _add_to(parts: Parts) -> None:
    if parts.config.scheduler_config.async_scheduling:
        parts.core_class = _core_class


AHEAD = Extension(add_to=_add_to)
