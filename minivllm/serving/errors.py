"""Why an engine takes no request. Stands for vllm/v1/engine/exceptions.py (v0.22.1)."""

from minivllm.errors import EngineDeadError, message_of


class QueueFull(RuntimeError):
    """As many requests are in the engine as it takes; ask again later."""


class Draining(RuntimeError):
    """The engine finishes what it has and takes nothing new."""


def died_of(error: BaseException) -> EngineDeadError:
    """What everybody is told who waits for an engine that this error ended."""
    if isinstance(error, EngineDeadError):
        return error
    dead = EngineDeadError(f"the engine has ended: {message_of(error)}; start another one")
    dead.__cause__ = error
    return dead
