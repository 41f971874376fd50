"""Adapters are read from disk beside the steps. Stands for `minivllm.serving.adapter_reader.AdapterReader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueues
from minivllm.serving.read_policy import ReadPolicy
from minivllm.simulate.adapters import RecordedWorker

ENGINE = 0  # its own work, beside that for adapters, whose ids are above


class Work(NamedTuple):
    """What the host does for a read.

    begins   seconds: when the disk has read it
    left     seconds that it would take alone, from then on
    """

    begins: float
    left: float


def shared(works: Mapping[int, Work], until: float = inf) -> tuple[dict[int, float], dict[int, Work]]:
    """Those that go on at the same time share one host evenly.

    Returns when each is through that is so by `until`, and what is left of the others then. Keys as in `works`.
    """
    ends, left = {}, dict(works)
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
                ends[key] = later
                del left[key]
        now = later
    return ends, left


class Reader:
    """One disk that reads one adapter after the other. It is a scheduler's `may_run`, as the `AdapterReader` is.

    seconds      adapter id -> seconds that the disk reads it
    unpacking    adapter id -> seconds that the host works on it after that. The disk reads the next one meanwhile, and
                 readers that work at the same time share the host
    most         as of `ReadPolicy`
    queues       the scheduler's: adapters in flight are waited for, and who runs is of the step that is being made
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
        self.reads: dict[int, float] = {}  # adapter id -> when it is there
        self.num_reads = 0
        self._disk_free = 0.0
        self._work: dict[int, Work] = {}  # of those that are being read

    def may_run(self, request: Request) -> str | None:
        """None, or LOADING while the request's adapter is being read; that begins here if need be."""
        adapter_id = request.adapter_id
        if not adapter_id or self.is_there(adapter_id):
            return None
        return self.policy.why_wait(adapter_id, lambda: self._begin(adapter_id))

    @property
    def held(self) -> dict[int, bool]:
        """As `Reads` has it."""
        return dict.fromkeys(self.reads, False) | dict.fromkeys(self.worker.done, True)

    def forget_unwanted(self) -> None:
        """As `Reads` has it; what the disk has begun it reads to its end."""
        self.worker.done = {a for a in self.worker.done if a in self.queues.in_flight}

    def is_there(self, adapter_id: int) -> bool:
        """Whether a step would find it without reading."""
        return adapter_id in self.worker.done or self.worker.manager.get_adapter(adapter_id) is not None

    def _begin(self, adapter_id: int) -> None:
        self._disk_free = max(self.now, self._disk_free) + self.seconds(adapter_id)
        self._add_work(adapter_id, Work(self._disk_free, self.unpacking(adapter_id)), self.now)
        self.num_reads += 1

    def engine_works(self, begins: float, seconds: float) -> float:
        """When the engine's own thread is through with work of so many seconds, which shares the host with reads."""
        return self._add_work(ENGINE, Work(begins, seconds), begins) if seconds else begins

    def _add_work(self, key: int, work: Work, now: float) -> float:
        """When the host is through with one more work, an adapter's or the ENGINE's; reads beside it end later."""
        _, left = shared(self._work, now)
        self._work = {k: w for k, w in left.items() if k in self.reads or k == ENGINE} | {key: work}
        ends, _ = shared(self._work)
        self.reads |= {a: ends[a] for a in self._work if a != ENGINE}
        return ends[key]

    def begin_ahead(self, adapter_id: int) -> None:
        """Read an adapter that is wanted ahead of its turn. One that no request waits for must not hold up others."""
        if adapter_id in self.reads or self.is_there(adapter_id):
            return
        if (adapter_id in self.queues.in_flight or not self.reads) and self.policy.has_room(is_ahead=True):
            self._begin(adapter_id)
            self.policy.ahead.add(adapter_id)

    def settle(self, now: float) -> None:
        """Take in what was read by now: for requests that wait, else into memory where somebody may go."""
        self.now = now
        for adapter_id in [a for a, there_at in self.reads.items() if there_at <= now]:
            del self.reads[adapter_id]
            self.worker.done.add(adapter_id)
            if adapter_id not in self.queues.in_flight:
                self.worker.add_ahead(adapter_id)

    @property
    def next_there(self) -> float | None:
        """When the next adapter is there; None if none is being read."""
        return min(self.reads.values(), default=None)
