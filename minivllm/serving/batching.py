"""Batches the work of one iteration of an event loop. Stands for nothing in vLLM 0.22.1.

Requests that arrive concurrently are read in one iteration of the loop. What each of them needs of another thread or
process goes there as one message, and the results come back as one. With `loop.run_in_executor` in the place of
`BatchingExecutor` a text cost 27 to 43 % more processor time before its first step, and a chat 21 to 31 %
(`benchmarks.request_cost`, 128 at once, four runs in turns beside other work).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from minivllm.errors import message_of

Outcome = tuple[Any, BaseException | None]  # a result, or the error that was raised


def call_at_end_of_iteration(function: Callable[[], object]) -> None:
    """Call a function after all else that the running loop does in this iteration; at once where no loop runs."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        function()
    else:
        loop.call_soon(function)


class BatchingExecutor:
    """Runs functions in another thread, those of one iteration of a loop by one call."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[], Any], asyncio.Future]]] = {}

    def run(self, function: Callable[[], Any]) -> asyncio.Future:
        """The function's result, a future of the running loop. Cancelling it may be too late to keep it from running.

        RuntimeError where the executor was shut down.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._waiting:
            self._waiting[loop] = []
            loop.call_soon(self._start, loop)
        future = loop.create_future()
        self._waiting[loop].append((function, future))
        return future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        functions, futures = zip(*self._waiting.pop(loop))

        def on_done(done: Future) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, futures, done.result())

        try:
            done = self._executor.submit(lambda: [_outcome(function) for function in functions])
        except RuntimeError as error:
            _settle(futures, [(None, error)] * len(futures))
        else:
            done.add_done_callback(on_done)


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return function(), None
    except StopIteration as error:  # a future refuses it
        return None, RuntimeError(message_of(error))
    except BaseException as error:  # of any kind: it is raised where its own future is awaited
        return None, error


def _settle(futures: tuple[asyncio.Future, ...], outcomes: list[Outcome]) -> None:
    for future, (result, error) in zip(futures, outcomes):
        if future.cancelled():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
