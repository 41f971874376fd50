"""Calls from any thread to the one that has the engine, and their results back.

Stands for vllm/v1/engine/core_client.py (v0.22.1), which hands them to another process.
"""

from labs.kit.overlay import Todo
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from minivllm.errors import is_recoverable
from minivllm.serving.errors import died_of

T, E = TypeVar("T"), TypeVar("E")


class HandOver(Generic[E]):
    """Functions of an engine that wait for its thread, in the order in which they came.

    error   what every call gets once the thread has ended; None before
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[E], Any], Future]] = queue.SimpleQueue()

    @property
    def waits(self) -> bool:
        """Whether there are calls that nobody has run."""
        return not self._calls.empty()

    # region lab 9.1: calls from any thread
    def call(self, function: Callable[[E], T]) -> "Future[T]":
        """Have the engine's thread run `function(engine)`. Any thread may call, and none is held up.

        The future has the result or what was raised. A call whose future is cancelled before its turn is never run.
        """
        raise Todo("lab 9.1: calls from any thread")

    def run(self, engine: E, wait: bool) -> None:
        """Run all calls there are, in the engine's thread. What is no fault (`is_recoverable`) is raised here.

        wait   for one, if there is none
        """
        raise Todo("lab 9.1: calls from any thread")

    def end(self, error: Exception) -> None:
        """From now on every call gets this error, those that wait among them."""
        raise Todo("lab 9.1: calls from any thread")

    def _refuse_all(self) -> None:
        """All calls that wait get the error, but for those that were cancelled, which may happen at any moment."""
        raise Todo("lab 9.1: calls from any thread")

    # endregion


# region lab 9.1: one of the calls
def _run(function: Callable[[E], Any], future: Future, engine: E) -> None:
    """Run the function, unless its future was cancelled; the future gets the result or the error.

    What is no fault is raised, too, and the future gets an EngineDeadError that names it (`died_of`): a Ctrl-C that
    reached a caller as its own would end an event loop.
    """
    raise Todo("lab 9.1: one of the calls")


# endregion
