"""The unfinished requests: who runs, and who waits, for which adapter, since when. Stands for
vllm/v1/core/sched/request_queue.py and the lists of vllm/v1/core/sched/scheduler.py (v0.22.1).

A step must not cost more because many wait. So it never walks the queue: all that it looks up is kept in order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedDict, SortedList

from minivllm.core.request import Request
from minivllm.lora.request import LoRARequest


class RequestQueues:
    """What one scheduler has to do. It alone changes them; others only look, and keep the object, not its parts.

    It moves requests, and the registry of adapters asks which of these are in use: both are given this object, and
    neither has to know the other.

    requests    request id -> every unfinished request, wherever it is
    waiting     by arrival; a preempted request goes back to its place
    running     by admission, so that prompts in the making come after all who already answer
    in_flight   adapter id, 0 for base -> generation -> how many unfinished requests, waiting or running, are of it
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """No request any more, and no wait."""
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.in_flight: dict[int, Counter[int]] = {}

    def enter(self, request: Request) -> None:
        """It is unfinished from now on."""
        self.requests[request.request_id] = request
        self.in_flight.setdefault(request.adapter_id, Counter())[request.adapter_generation] += 1

    def leave(self, request: Request) -> None:
        """It has ended."""
        del self.requests[request.request_id]
        generations = self.in_flight[request.adapter_id]
        generations[request.adapter_generation] -= 1
        if not generations[request.adapter_generation]:
            del generations[request.adapter_generation]
        if not generations:
            del self.in_flight[request.adapter_id]

    def reassign(self, request: Request, lora_request: LoRARequest, generation: int) -> None:
        """A request that does not run goes on with another adapter, in its place by arrival."""
        waits = request in self.waiting
        if waits:
            self.waiting.remove(request)
        self.leave(request)
        request.lora_request, request.adapter_generation = lora_request, generation
        request.adapter_id = lora_request.lora_int_id
        self.enter(request)
        if waits:
            self.waiting.add(request)


@dataclass(eq=False)
class AdapterQueue:
    """The waiting requests of one adapter, or of base (0), and how long the adapter has waited for a slot.

    arrivals        arrival orders of its requests
    since           `WaitingQueue.step` when it was passed over; None while it does not wait for a slot
    steps_before    steps of its waits that have ended
    places          the queue's orders that it is in, and its key in each
    """

    arrivals: SortedList = field(default_factory=SortedList)
    since: int | None = None
    steps_before: int = 0
    places: list[tuple[SortedList, Any]] = field(default_factory=list)


class WaitingQueue:
    """Waiting requests by arrival, and those of each adapter; a preempted request goes back to its place.

    An adapter that was passed over waits for a slot, until a request of it joins. `step` is the clock of such waits.

    step            steps computed so far
    requests        arrival order -> request
    fresh           the first arrival of each adapter that does not wait for a slot, base among them
    passed_over     (since, first arrival) of each adapter that does: the longest wait first
    """

    def __init__(self) -> None:
        self.step = 0
        self.requests = SortedDict()
        self.fresh, self.passed_over = SortedList(), SortedList()
        self._of_adapter: dict[int, AdapterQueue] = {}
        # Adapters that were passed over and have lost their last waiting request in this step.
        self._left_empty: set[int] = set()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return self.requests.get(request.arrival_order) is request

    def add(self, request: Request) -> None:
        with self._changed(request.adapter_id) as queue:
            queue.arrivals.add(request.arrival_order)
        self.requests[request.arrival_order] = request
        request.lora_steps_at_entry = self._steps_waited(queue)

    def remove(self, request: Request, joins: bool = False) -> None:
        """joins   the request runs from now on, so its adapter has a slot: the adapter's wait is over"""
        queue = self._of_adapter[request.adapter_id]
        request.lora_wait_steps = self.wait_steps(request)
        if joins and queue.since is not None:
            self._start(request.adapter_id, None)
        with self._changed(request.adapter_id):
            queue.arrivals.remove(request.arrival_order)
        del self.requests[request.arrival_order]

    @property
    def adapters(self) -> list[int]:
        """Ids of those that requests wait for, base among them."""
        return [adapter_id for adapter_id, queue in self._of_adapter.items() if queue.arrivals]

    def of_adapters(self, adapter_ids: Iterable[int]) -> list[Request]:
        """The requests that wait for any of these adapters, by arrival."""
        arrivals = [arrival for a in adapter_ids for arrival in self._of_adapter[a].arrivals]
        return [self.requests[arrival] for arrival in sorted(arrivals)]

    def oldest(self, adapter_id: int) -> Request | None:
        """The first by arrival that waits for this adapter; None if none does."""
        queue = self._of_adapter.get(adapter_id)
        return self.requests[queue.arrivals[0]] if queue and queue.arrivals else None

    # Those to be asked. The queue may change between two of them.

    def longest_wait_first(self) -> Iterator[int]:
        """Adapters that were passed over and that requests wait for."""
        for _, arrival in after(self.passed_over, (-1, -1)):
            yield self.requests[arrival].adapter_id

    def by_arrival(self) -> Iterator[Request]:
        """The oldest request of each adapter that does not wait for a slot. When it has joined, the next one comes."""
        return map(self.requests.__getitem__, after(self.fresh, -1))

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
        return self.step - self._of_adapter[adapter_id].since if self.is_passed_over(adapter_id) else 0

    def wait_steps(self, request: Request) -> int:
        """Steps that a request has waited for its adapter to get a slot. A statistic: it is counted when asked for."""
        if request not in self:
            return request.lora_wait_steps
        steps = self._steps_waited(self._of_adapter[request.adapter_id])
        return request.lora_wait_steps + steps - request.lora_steps_at_entry

    def place(self, adapter_id: int) -> tuple[int, int] | None:
        """Its key in `passed_over`, if it is there."""
        queue = self._of_adapter.get(adapter_id)
        waits = queue and queue.arrivals and queue.since is not None
        return (queue.since, queue.arrivals[0]) if waits else None

    def end_step(self) -> None:
        """A step was computed. Adapters that no request waits for any more do not wait, either."""
        for adapter_id in self._left_empty:
            if self.oldest(adapter_id) is None:
                self._of_adapter.pop(adapter_id, None)
        self._left_empty.clear()
        self.step += 1

    def _steps_waited(self, queue: AdapterQueue) -> int:
        return queue.steps_before + (0 if queue.since is None else self.step - queue.since)

    def _start(self, adapter_id: int, since: int | None) -> None:
        """End the wait, if there is one. Another begins at step `since`; None: it does not wait."""
        with self._changed(adapter_id) as queue:
            queue.steps_before, queue.since = self._steps_waited(queue), since

    @contextmanager
    def _changed(self, adapter_id: int) -> Iterator[AdapterQueue]:
        """Around a change of an adapter's queue: it leaves the orders before, and joins them by its new keys after."""
        queue = self._of_adapter.setdefault(adapter_id, AdapterQueue())
        for order, key in queue.places:
            order.remove(key)
        yield queue
        queue.places = []
        for first in queue.arrivals[:1]:
            if queue.since is None:
                queue.places = [(self.fresh, first)]
            else:
                queue.places = [(self.passed_over, (queue.since, first))]
        for order, key in queue.places:
            order.add(key)
        if queue.since is not None and not queue.arrivals:
            self._left_empty.add(adapter_id)
        elif not queue.arrivals:
            del self._of_adapter[adapter_id]


def after(keys: SortedList, key: Any) -> Iterator[Any]:
    """The keys that are greater than `key`, one by one. Keys may come and go meanwhile."""
    while (position := keys.bisect_right(key)) < len(keys):
        key = keys[position]
        yield key
