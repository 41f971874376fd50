"""A queue of calls from any thread to the engine's, whose results come back as futures.

Stands for the queues of `EngineCoreProc` in vllm/v1/engine/core.py (v0.22.1), which a socket fills.
"""

from labs.kit.overlay import Todo
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from minivllm.errors import died_of, is_recoverable

T, E = TypeVar("T"), TypeVar("E")


class CallQueue(Generic[E]):
    """Functions of an engine that wait for its thread to run them, first in, first out.

    error   every call gets it once the thread has ended; None before
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[E], Any], Future]] = queue.SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Whether no call waits."""
        return self._calls.empty()

    # region lab 9.1: calls from any thread
    def call(self, function: Callable[[E], T]) -> "Future[T]":
        """Have the engine's thread run `function(engine)`. Any thread may call, and none blocks.

        The future gets the result or the error. A call whose future is cancelled while it waits is never run.
        """
        raise Todo("lab 9.1: calls from any thread")

    def run(self, engine: E, wait: bool) -> None:
        """Run all calls that wait, in the engine's thread. Raises an error that is not recoverable (`is_recoverable`).

        wait   for a call, if none waits
        """
        raise Todo("lab 9.1: calls from any thread")

    def end(self, error: Exception) -> None:
        """From now on every call gets this error, also those that wait."""
        raise Todo("lab 9.1: calls from any thread")

    def _refuse_all(self) -> None:
        """Take all calls that wait and set the error, except for calls that were cancelled, which may happen at any
        moment."""
        raise Todo("lab 9.1: calls from any thread")

    # endregion


# region lab 9.1: one of the calls
def _run(function: Callable[[E], Any], future: Future, engine: E) -> None:
    """Run the function, unless its future was cancelled; the future gets the result or the error.

    An error that is not recoverable is raised here, too, and the future gets an EngineDeadError that names it
    (`died_of`), because a KeyboardInterrupt raised from a future would end the caller's event loop.
    """
    raise Todo("lab 9.1: one of the calls")


# endregion
