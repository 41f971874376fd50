"""Who waits, for which adapter, and since when. Stands for vllm/v1/core/sched/request_queue.py (v0.22.1).

A step must not cost more because many wait, so it never walks the queue: all that it looks up is kept in order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Any

from minivllm.core.request import Request


class SortedKeys:
    """Keys in ascending order, no two the same.

    A look-up is a binary search. To add or remove a key also moves the keys behind it, by one copy of memory.
    """

    def __init__(self) -> None:
        self._keys: list[Any] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __getitem__(self, index: int) -> Any:
        return self._keys[index]

    def add(self, key: Any) -> None:
        insort(self._keys, key)

    def remove(self, key: Any) -> None:
        """Take out a key that is there."""
        del self._keys[bisect_left(self._keys, key)]

    def num_after(self, key: Any) -> int:
        """How many are greater."""
        return len(self._keys) - bisect_right(self._keys, key)

    def next_after(self, key: Any) -> Any | None:
        """The first that is greater."""
        position = bisect_right(self._keys, key)
        return self._keys[position] if position < len(self._keys) else None

    def after(self, key: Any) -> Iterator[Any]:
        """All that are greater, one by one; keys may come and go meanwhile."""
        while (key := self.next_after(key)) is not None:
            yield key


class AdapterQueue:
    """The waiting requests of one adapter, or of base, and how long the adapter has waited for a slot.

    arrivals    arrival orders of its requests
    since       `WaitingQueue.step` when it was passed over; None while it does not wait for a slot
    """

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._steps_of_earlier_waits = 0
        self.arrivals = SortedKeys()
        self.since: int | None = None

    @property
    def waited(self) -> int:
        """Steps since it was passed over."""
        return 0 if self.since is None else self._queue.step - self.since

    @property
    def steps_waited(self) -> int:
        """Steps of this wait and of all before it."""
        return self._steps_of_earlier_waits + self.waited

    @property
    def place(self) -> tuple[int, int] | None:
        """Where it stands among those that were passed over: (since, first arrival). None if it does not."""
        return (self.since, self.arrivals[0]) if self.since is not None and self.arrivals else None

    def start(self, since: int | None) -> None:
        """End the wait, if there is one. Another begins at step `since`; None: it does not wait."""
        self._steps_of_earlier_waits = self.steps_waited
        self.since = since


class WaitingQueue:
    """Waiting requests by arrival, and those of each adapter; a preempted request goes back to its place.

    An adapter that was passed over waits for a slot. `step` is the clock of such waits.

    step            steps computed so far
    arrivals        the arrival order of each request
    fresh           the first arrival of each adapter that does not wait for a slot, base among them
    passed_over     (since, first arrival) of each adapter that does: the longest wait first
    passed_over_arrivals    the first arrivals of the same adapters
    """

    def __init__(self) -> None:
        self.step = 0
        self.fresh = SortedKeys()
        self.passed_over = SortedKeys()
        self.passed_over_arrivals = SortedKeys()
        self.arrivals = SortedKeys()
        self._requests: dict[int, Request] = {}  # by arrival
        self._of_adapter: dict[int, AdapterQueue] = {}
        # Adapters that were passed over and have lost their last waiting request in this step.
        self._left_empty: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return map(self._requests.__getitem__, self.arrivals)

    def __getitem__(self, index: int) -> Request:
        return self._requests[self.arrivals[index]]

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.arrival_order) is request

    def add(self, request: Request) -> None:
        queue = self._queue(request.adapter_id)
        self._unlist(queue)
        self._requests[request.arrival_order] = request
        self.arrivals.add(request.arrival_order)
        queue.arrivals.add(request.arrival_order)
        self._list(queue)
        request.enter(queue)

    def remove(self, request: Request) -> None:
        queue = self._of_adapter[request.adapter_id]
        self._unlist(queue)
        del self._requests[request.arrival_order]
        self.arrivals.remove(request.arrival_order)
        queue.arrivals.remove(request.arrival_order)
        self._list(queue)
        request.leave()
        if not queue.arrivals and queue.since is None:
            del self._of_adapter[request.adapter_id]
        elif not queue.arrivals:
            self._left_empty.add(request.adapter_id)

    @property
    def adapters(self) -> list[int]:
        """Ids of those that requests wait for, base among them."""
        return [adapter_id for adapter_id, queue in self._of_adapter.items() if queue.arrivals]

    def of_adapters(self, adapter_ids: Iterable[int]) -> list[Request]:
        """The requests that wait for any of these adapters, by arrival."""
        arrivals = [arrival for a in adapter_ids for arrival in self._of_adapter[a].arrivals]
        return [self._requests[arrival] for arrival in sorted(arrivals)]

    def oldest(self, adapter_id: int) -> Request | None:
        """The first by arrival that waits for this adapter; None if none does."""
        queue = self._of_adapter.get(adapter_id)
        return self._requests[queue.arrivals[0]] if queue and queue.arrivals else None

    def arrived(self, arrival: int) -> Request:
        return self._requests[arrival]

    # Adapters that wait for a slot.

    def pass_over(self, adapter_id: int) -> None:
        """Its wait begins, if it does not wait yet."""
        if not self.is_passed_over(adapter_id):
            self.begin_wait(adapter_id)

    def begin_wait(self, adapter_id: int) -> None:
        """Its wait begins, and begins again if it did wait."""
        self._start(adapter_id, self.step)

    def is_passed_over(self, adapter_id: int) -> bool:
        queue = self._of_adapter.get(adapter_id)
        return queue is not None and queue.since is not None

    def waited(self, adapter_id: int) -> int:
        """Steps since it was passed over; 0 if it does not wait."""
        queue = self._of_adapter.get(adapter_id)
        return queue.waited if queue else 0

    def place(self, adapter_id: int) -> tuple[int, int] | None:
        """Its key in `passed_over`, if it is there."""
        queue = self._of_adapter.get(adapter_id)
        return queue.place if queue else None

    def longest_wait_first(self) -> Iterator[int]:
        """Adapters that were passed over and that requests wait for; the queue may change between two of them."""
        for _, arrival in self.passed_over.after((-1, -1)):
            yield self._requests[arrival].adapter_id

    def end_step(self, ran: Iterable[int]) -> None:
        """A step was computed. Adapters that ran, or that no request waits for, wait no more; the others wait on."""
        left_empty = {adapter_id for adapter_id in self._left_empty if self.oldest(adapter_id) is None}
        for adapter_id in {*ran, *left_empty}:
            if self.is_passed_over(adapter_id):
                self._start(adapter_id, None)
        self._left_empty.clear()
        self.step += 1

    def _start(self, adapter_id: int, since: int | None) -> None:
        queue = self._queue(adapter_id)
        self._unlist(queue)
        queue.start(since)
        self._list(queue)
        if not queue.arrivals and since is None:
            del self._of_adapter[adapter_id]
        elif not queue.arrivals:
            self._left_empty.add(adapter_id)

    def _queue(self, adapter_id: int) -> AdapterQueue:
        if adapter_id not in self._of_adapter:
            self._of_adapter[adapter_id] = AdapterQueue(self)
        return self._of_adapter[adapter_id]

    def _list(self, queue: AdapterQueue) -> None:
        """Put the adapter into the orders above, by its first arrival and its wait."""
        if not queue.arrivals:
            return
        first = queue.arrivals[0]
        if queue.place is None:
            self.fresh.add(first)
        else:
            self.passed_over.add(queue.place)
            self.passed_over_arrivals.add(first)

    def _unlist(self, queue: AdapterQueue) -> None:
        """Take it out of them, before its first arrival or its wait changes."""
        if not queue.arrivals:
            return
        first = queue.arrivals[0]
        if queue.place is None:
            self.fresh.remove(first)
        else:
            self.passed_over.remove(queue.place)
            self.passed_over_arrivals.remove(first)
