"""Reads adapters on the virtual clock. Stands for `minivllm.serving.adapter_reader.AdapterReader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueues
from minivllm.serving.read_policy import ReadPolicy
from minivllm.simulate.adapters import RecordedWorker

ENGINE = 0  # the key of the engine's own work; adapters have ids above


class Work(NamedTuple):
    """The host's work for a read.

    begins   seconds: when the disk has read the adapter
    left     seconds that the work takes from then on, if the host does nothing else
    """

    begins: float
    left: float


def shared(works: Mapping[int, Work], until: float = inf) -> tuple[dict[int, float], dict[int, Work]]:
    """Share one host evenly among concurrent works.

    Returns when each work that has finished by `until` did so, and what is left of the others then. Keys as in `works`.
    """
    finished_at, left = {}, dict(works)
    now = min((work.begins for work in works.values()), default=until)
    while left and now < until:
        active = [key for key, work in left.items() if work.begins <= now]
        later = min([until, *(work.begins for work in left.values() if work.begins > now)])
        done, least = (
            (later - now) / max(1, len(active)),
            min((left[key].left for key in active), default=inf),
        )
        if least <= done:
            done, later = least, now + least * len(active)
        for key in active:
            left[key] = Work(later, left[key].left - done)
            if left[key].left <= 0:
                finished_at[key] = later
                del left[key]
        now = later
    return finished_at, left


class Reader:
    """One disk that reads one adapter after the other. The scheduler asks its `why_wait`.

    seconds      adapter id -> seconds that the disk reads it
    unpacking    adapter id -> seconds of the host's work on it after that. The disk reads the next one meanwhile, and
                 concurrent reads share the host
    most         as in `ReadPolicy`
    queues       the scheduler's: requests wait for adapters in flight; `running` is of the step that is being scheduled
    """

    def __init__(
        self,
        worker: RecordedWorker,
        queues: RequestQueues,
        seconds: Callable[[int], float],
        most: int,
        unpacking: Callable[[int], float] = lambda adapter_id: 0.0,
    ) -> None:
        self.worker, self.queues, self.seconds = worker, queues, seconds
        self.policy = ReadPolicy(self, most, queues)
        self.unpacking = unpacking
        self.now = 0.0
        self.reads: dict[int, float] = {}  # adapter id -> when it has been read
        self.num_reads = 0
        self._disk_free = 0.0
        self._work: dict[int, Work] = {}  # by id, of adapters that are being read

    def why_wait(self, request: Request) -> str | None:
        """None, or LOADING while the request's adapter is being read. Starts the read."""
        adapter_id = request.adapter_id
        if not adapter_id or self.is_there(adapter_id):
            return None
        return self.policy.begin_or_wait(adapter_id, lambda: self._begin(adapter_id))

    @property
    def held(self) -> dict[int, bool]:
        """As in `Reads`."""
        return dict.fromkeys(self.reads, False) | dict.fromkeys(self.worker.done, True)

    def forget_unwanted(self) -> None:
        """As in `Reads`; a read that the disk has begun is finished."""
        self.worker.done = {a for a in self.worker.done if a in self.queues.in_flight}

    def is_there(self, adapter_id: int) -> bool:
        """Whether a step would find the adapter without reading it."""
        return adapter_id in self.worker.done or self.worker.manager.get_adapter(adapter_id) is not None

    def _begin(self, adapter_id: int) -> None:
        self._disk_free = max(self.now, self._disk_free) + self.seconds(adapter_id)
        self._add_work(adapter_id, Work(self._disk_free, self.unpacking(adapter_id)), self.now)
        self.num_reads += 1

    def engine_works(self, begins: float, seconds: float) -> float:
        """When work of so many seconds in the engine's own thread, which shares the host with reads, is finished."""
        return self._add_work(ENGINE, Work(begins, seconds), begins) if seconds else begins

    def _add_work(self, key: int, work: Work, now: float) -> float:
        """When one more work, an adapter's or the ENGINE's, is finished. Concurrent reads are finished later for it."""
        _, left = shared(self._work, now)
        self._work = {k: w for k, w in left.items() if k in self.reads or k == ENGINE} | {key: work}
        finished_at, _ = shared(self._work)
        self.reads |= {a: finished_at[a] for a in self._work if a != ENGINE}
        return finished_at[key]

    def begin_ahead(self, adapter_id: int) -> None:
        """Prefetch an adapter. If no request waits for it, only when nothing else is being read."""
        if adapter_id in self.reads or self.is_there(adapter_id):
            return
        if (adapter_id in self.queues.in_flight or not self.reads) and self.policy.has_room(is_ahead=True):
            self._begin(adapter_id)
            self.policy.ahead.add(adapter_id)

    def settle(self, now: float) -> None:
        """Register adapters that have been read by now: for waiting requests, or else in memory (`add_ahead`)."""
        self.now = now
        for adapter_id in [a for a, there_at in self.reads.items() if there_at <= now]:
            del self.reads[adapter_id]
            self.worker.done.add(adapter_id)
            if adapter_id not in self.queues.in_flight:
                self.worker.add_ahead(adapter_id)

    @property
    def next_there(self) -> float | None:
        """When the next adapter has been read; None if none is being read."""
        return min(self.reads.values(), default=None)
