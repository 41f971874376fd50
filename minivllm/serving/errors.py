"""Why an engine takes no request. Stands for vllm/v1/engine/exceptions.py (v0.22.1)."""

from minivllm.errors import EngineDeadError, died_of

__all__ = ["Draining", "EngineDeadError", "QueueFull", "died_of"]


class QueueFull(RuntimeError):
    """As many requests are in the engine as it takes; ask again later."""


class Draining(RuntimeError):
    """The engine finishes what it has and takes nothing new."""
