"""Outputs on their way from the engine's thread to a consumer in an event loop.

Stands for `RequestOutputCollector` of vllm/v1/engine/output_processor.py (v0.22.1).
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Generic, Literal, Protocol, TypeVar

from minivllm.engine.outputs import CompletionOutput, RequestOutput

OutputKind = Literal["delta", "cumulative", "final"]
T = TypeVar("T")


class Sink(Protocol):
    """Takes a request's outputs, or the error that ends them: a `Stream`, or a queue of the standard library."""

    def put(self, item: RequestOutput | Exception) -> bool | None:
        """True: the consumer has to be woken."""


class Stream(Generic[T]):
    """A queue from the engine's thread to one consumer in an event loop, which holds at most one item.

    merge    makes one item of the one that waits and a newer one, so that a slow consumer costs no memory
    is_due   whether an item wakes the consumer; an item that does not waits for one that does
    last     the last item that was put
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        merge: Callable[[T, T], T],
        is_due: Callable[[T], bool] = lambda item: True,
    ) -> None:
        self.loop = loop
        self.last: T | None = None
        self._merge, self._is_due = merge, is_due
        self._lock = threading.Lock()
        self._waiting: T | None = None
        self._error: Exception | None = None
        self._is_woken = False
        self._ready = asyncio.Event()

    # region lab 9.2: what a slow consumer finds
    def put(self, item: T | Exception) -> bool:
        """Called in the engine's thread. True: the consumer has to be woken (`wake`), or its loop is closed.

        An error is raised by `take`.
        """
        with self._lock:
            if isinstance(item, Exception):
                self._error = item
            else:
                self._waiting = item if self._waiting is None else self._merge(self._waiting, item)
                self.last = item
            was_woken = self._is_woken
            self._is_woken = was_woken or isinstance(item, Exception) or self._is_due(item)
            return (self._is_woken and not was_woken) or self.loop.is_closed()

    async def take(self) -> T:
        """Called in the event loop: wait for items, and return all that were put since the last call as one."""
        await self._ready.wait()
        with self._lock:
            item, self._waiting = self._waiting, None
            self._is_woken = False
            self._ready.clear()
        if self._error is not None:
            raise self._error
        return item

    # endregion


def wake(streams: Iterable[Stream]) -> list[Stream]:
    """Wake the consumers of these streams, by one call for each loop. Returns the streams whose loop is closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    lost = []
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, of_loop)
        except RuntimeError:  # the loop is closed
            lost += of_loop
    return lost


def _wake_all(streams: list[Stream]) -> None:
    for stream in streams:
        stream._ready.set()


# ---- of requests ----------------------------------------------------------------------------------------------


def output_stream(loop: asyncio.AbstractEventLoop, kind: OutputKind) -> "Stream[RequestOutput]":
    """A stream of one request's outputs.

    kind   "delta": outputs that wait are merged, with the deltas of all; "cumulative": a newer output replaces the one
           that waits, and its deltas are those of one step; "final": the last output alone
    """
    if kind == "final":
        return Stream(loop, newest, is_due=lambda output: output.finished)
    return Stream(loop, merged if kind == "delta" else newest)


# region lab 9.2: two outputs as one
def merged(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """The later output, with the deltas of both."""
    answers = [
        replace(
            new,
            delta_text=old.delta_text + new.delta_text,
            delta_token_ids=old.delta_token_ids + new.delta_token_ids,
        )
        for old, new in zip(earlier.outputs, later.outputs)
    ]
    return replace(later, outputs=answers)


# endregion


def newest(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    return later


def aborted(request_id: str, last: RequestOutput | None) -> RequestOutput:
    """The last output of a request that was aborted.

    last   its output before that, if there was one
    """
    last = last or RequestOutput(request_id, None, [], [CompletionOutput(0, "", [])], finished=False)
    answers = [
        replace(answer, finish_reason=answer.finish_reason or "abort", delta_text="", delta_token_ids=[])
        for answer in last.outputs
    ]
    return replace(last, outputs=answers, finished=True)
