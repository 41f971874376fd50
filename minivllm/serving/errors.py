"""Why an engine takes no request. Stands for vllm/v1/engine/exceptions.py (v0.22.1)."""

from minivllm.faults import reason


class EngineDeadError(RuntimeError):
    """The engine has ended, and with it every request. vLLM: the same name."""


class QueueFull(RuntimeError):
    """As many requests are in the engine as it takes; ask again later."""


class Draining(RuntimeError):
    """The engine finishes what it has and takes nothing new."""


def died_of(error: BaseException) -> EngineDeadError:
    """What everybody is told who waits for an engine that this error ended."""
    dead = EngineDeadError(f"the engine has ended: {reason(error)}; start another one")
    dead.__cause__ = error
    return dead
