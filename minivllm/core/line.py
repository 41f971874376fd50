"""Which waiting requests a step asks, and in which order. To ask one is to look whether it can join.

Stands for a loop in vllm/v1/core/sched/scheduler.py (v0.22.1), which asks every waiting request at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from math import inf

from minivllm.core.lora_admission import LoRAAdmission
from minivllm.core.output import MAX_LORAS, NO_BLOCKS, SchedulerOutput, Skip
from minivllm.core.request import Request
from minivllm.core.waiting_queue import WaitingQueue

# A place in line: (0, a key of `WaitingQueue.passed_over`), and after all of these (1, an arrival order).
Place = tuple[int, object]
START: Place = (0, (-1, -1))
END: Place = (1, inf)


class Line:
    """Waiting requests in line: the oldest of each adapter that was passed over, the longest wait first; then all
    others by arrival. So within an adapter the first to come is the first served.

    Only those are asked whose answer is not known. If a request cannot join, no later one of its adapter can. An
    adapter that was passed over is asked only if a slot is free, or if it has one. So the cost of a step grows with
    the requests it admits, not with those that wait.

    A line is for one step. Its caller goes through it once, and admits or skips each request before it takes the next.
    """

    def __init__(self, waiting: WaitingQueue, lora: LoRAAdmission) -> None:
        self.waiting = waiting
        self.lora = lora
        self._num_others = len(waiting) - len(waiting.passed_over)
        # Adapters that were passed over and whose oldest request has joined: their others stand by arrival.
        self._joined: set[int] = set()
        # The request asked last, its place, and the place of the one asked before it.
        self._last: Request | None = None
        self._before, self._place = START, START
        # Adapter -> why its request that was asked last did not join.
        self._reasons: dict[int, str] = {}

    def __iter__(self) -> Iterator[Request]:
        for adapter_id in self._passed_over():
            request = self.waiting.oldest(adapter_id)
            yield self._ask(request, (0, self.waiting.place(adapter_id)))
            if request not in self.waiting:
                self._joined.add(adapter_id)
        arrival = -1
        while (arrival := self._next_arrival(arrival)) is not None:
            request = self.waiting.arrived(arrival)
            yield self._ask(request, (1, arrival))
            if request in self.waiting:
                self._joined.discard(request.adapter_id)
        if self._num_behind(self._place):
            # Nobody behind can join, but they may be told that the step is full.
            yield self._ask(self.waiting[-1], END)
        self._before = END

    def _ask(self, request: Request, place: Place) -> Request:
        self._before, self._place, self._last = self._place, place, request
        return request

    def _passed_over(self) -> Iterator[int]:
        """Adapters that were passed over, the longest wait first: while a slot is free all, then those with a slot."""
        asked = set()
        for adapter_id in self.waiting.longest_wait_first():
            if len(self.lora.taken) >= self.lora.max_loras:
                break
            if (
                adapter_id not in asked
            ):  # it comes up again, with its next request, when its oldest has joined
                asked.add(adapter_id)
                yield adapter_id
        with_a_slot = [a for a in self.lora.taken - asked if self.waiting.place(a)]
        yield from sorted(with_a_slot, key=self.waiting.place)

    def _next_arrival(self, arrival: int) -> int | None:
        """The next to ask by arrival: the oldest of an adapter that was not passed over, or of one in `_joined`."""
        oldest = [self.waiting.oldest(adapter_id) for adapter_id in self._joined]
        arrivals = [request.arrival_order for request in oldest if request is not None]
        fresh = self.waiting.fresh.next_after(arrival)
        return min(arrivals if fresh is None else [*arrivals, fresh], default=None)

    # Which requests were passed over, asked or not.

    def skip(self, request: Request, reason: str) -> None:
        """The request, which was asked last, cannot join, nor can any later one of its adapter."""
        if self._place != END:
            self._reasons[request.adapter_id] = reason

    def tell_skips(
        self, output: SchedulerOutput, most: int, held_back: Callable[[Request], str | None]
    ) -> None:
        """Fill in `output.num_skipped`, of all that were passed over, and `output.skipped`, of the first `most`."""
        if self._last is None:
            return  # nobody was asked
        halted_by = output.halted_by
        no_blocks_for = self._last if halted_by == NO_BLOCKS else None
        end = self._place if halted_by == NO_BLOCKS else self._before
        output.num_skipped = len(self.waiting) - self._num_behind(end) - (no_blocks_for is not None)
        skipped = (request for request in self._until(end) if request is not no_blocks_for)
        for request in islice(skipped, most):
            reason = held_back(request) or self._reasons.get(request.adapter_id, MAX_LORAS)
            output.skipped.append(Skip(request.request_id, request.adapter_id, reason))

    def _until(self, end: Place) -> Iterator[Request]:
        """Requests that wait in line up to a place, if all up to there were asked.

        Up to an arrival these are all that came no later, then the oldest of adapters that were passed over.
        """
        stage, last = end
        if stage == 0:
            places = takewhile(lambda place: place <= last, self.waiting.passed_over)
            oldest, others = (arrival for _, arrival in places), ()
        else:
            others = takewhile(lambda arrival: arrival <= last, self.waiting.arrivals)
            oldest = self.waiting.passed_over_arrivals.after(last)
        yield from map(self.waiting.arrived, others)
        for request in map(self.waiting.arrived, oldest):
            if request.adapter_id not in self._joined:
                yield request

    def _num_behind(self, place: Place) -> int:
        """How many are in line after a place up to which all were asked."""
        stage, last = place
        places = [self.waiting.place(adapter_id) for adapter_id in self._joined]
        places = [place for place in places if place is not None]
        if stage == 0:
            # Where the oldest has joined, its place has gone to the next of its adapter, which stands by arrival.
            again = sum(place > last for place in places)
            return self._num_others + self.waiting.passed_over.num_after(last) - again
        again = sum(arrival > last for _, arrival in places)
        asked_before = self.waiting.passed_over_arrivals.num_after(last) - again
        return self.waiting.arrivals.num_after(last) - asked_before
