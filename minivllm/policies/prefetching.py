"""Which adapters are read from disk before a step asks for them.

A policy is called before every step, and names adapters in the order in which they are to be read. Those that are in
memory, or are being read, are passed over: to name one twice does no harm. One that no request waits for is read when
the disk has nothing else to do. vLLM (v0.22.1) reads an adapter in the step that needs it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from minivllm.core.request import Request
from minivllm.core.request_queue import WaitingQueue


@dataclass(frozen=True)
class Waiting:
    """What is known before a step.

    now        seconds
    arrived    requests that came since the step before
    answered   requests that ended with it
    queue      all requests that wait, those of `arrived` among them
    capacity   adapters that memory holds
    """

    now: float
    arrived: Sequence[Request]
    answered: Sequence[Request]
    queue: WaitingQueue
    capacity: int


PrefetchPolicy = Callable[[Waiting], Iterable[int]]


def on_arrival(waiting: Waiting) -> list[int]:
    """The adapters of requests that have just arrived."""
    return [request.adapter_id for request in waiting.arrived if request.adapter_id]


class ByQueuePosition:
    """The adapters of the first `most` requests in the queue. Base has a place there, and nothing to read."""

    def __init__(self, most: int = 16) -> None:
        self.most = most

    # region lab 10.4: read ahead, by queue position
    def __call__(self, waiting: Waiting) -> list[int]:
        return [request.adapter_id for request in islice(waiting.queue, self.most) if request.adapter_id]

    # endregion


class BySession:
    """The adapters of requests that have just arrived, then those of the last `think_s` seconds' answers, latest first.

    Who has read an answer may ask again, by the same adapter. At most half as many as
    memory holds are named of those: more would drive each other out.
    """

    def __init__(self, think_s: float = 30.0) -> None:
        self.think_s = think_s
        self._answered_at: dict[int, float] = {}  # adapter id -> time, the latest last

    # region lab 10.4: read ahead, by session
    def __call__(self, waiting: Waiting) -> list[int]:
        for request in waiting.answered:
            if request.adapter_id:
                self._answered_at.pop(request.adapter_id, None)
                self._answered_at[request.adapter_id] = waiting.now
        while self._answered_at:
            oldest = next(iter(self._answered_at))
            if waiting.now - self._answered_at[oldest] <= self.think_s:
                break
            del self._answered_at[oldest]
        return [*on_arrival(waiting), *islice(reversed(self._answered_at), waiting.capacity // 2)]

    # endregion


# Name -> what makes a policy for one engine; None = an adapter is read when its request's turn has come.
POLICIES: dict[str, Callable[[], PrefetchPolicy] | None] = {
    "none": None,
    "arrival": lambda: on_arrival,
    "queue": ByQueuePosition,
    "session": BySession,
}
