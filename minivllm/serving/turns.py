"""What comes in one turn of an event loop, together. Stands for nothing in vLLM 0.22.1.

Requests that arrive at once are read in one turn. What each needs from another thread, or process, goes there as one
message, and what they wait for comes back as one.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from minivllm.errors import message_of

Outcome = tuple[Any, BaseException | None]  # a result, or what was raised


def call_at_end_of_turn(function: Callable[[], object]) -> None:
    """Behind whatever else this turn of the running loop does; at once where no loop runs."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        function()
    else:
        loop.call_soon(function)


class TurnExecutor:
    """Functions that wait for a thread of their own, those of one turn as one call."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[], Any], asyncio.Future]]] = {}

    def run(self, function: Callable[[], Any]) -> asyncio.Future:
        """Its result, for the loop that runs. One that is cancelled may be run all the same."""
        loop = asyncio.get_running_loop()
        if loop not in self._waiting:
            self._waiting[loop] = []
            loop.call_soon(self._start, loop)
        future = loop.create_future()
        self._waiting[loop].append((function, future))
        return future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        functions, futures = zip(*self._waiting.pop(loop))
        try:
            done = self._executor.submit(_run_all, functions)
        except RuntimeError as error:  # it was shut down meanwhile
            _settle(futures, [(None, error)] * len(futures))
        else:
            done.add_done_callback(lambda done: _tell(loop, futures, done))


def _run_all(functions: tuple[Callable[[], Any], ...]) -> list[Outcome]:
    return [_outcome(function) for function in functions]


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return function(), None
    except StopIteration as error:  # no future takes it
        return None, RuntimeError(message_of(error))
    except BaseException as error:  # whoever waits for it hears of it, and nobody else
        return None, error


def _tell(loop: asyncio.AbstractEventLoop, futures: tuple[asyncio.Future, ...], done: Future) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(_settle, futures, done.result())


def _settle(futures: tuple[asyncio.Future, ...], outcomes: list[Outcome]) -> None:
    for future, (result, error) in zip(futures, outcomes):
        if future.cancelled():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
