"""Outputs on their way from the engine's thread to a consumer in an event loop.

Stands for `RequestOutputCollector` of vllm/v1/engine/output_processor.py (v0.22.1).
"""

from labs.kit.overlay import Todo
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
        raise Todo("lab 9.2: what a slow consumer finds")

    async def take(self) -> T:
        """Called in the event loop: wait for items, and return all that were put since the last call as one."""
        raise Todo("lab 9.2: what a slow consumer finds")

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
    raise Todo("lab 9.2: two outputs as one")


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
