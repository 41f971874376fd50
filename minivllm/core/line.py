"""Whom a step asks, and in which order. Stands for a loop in vllm/v1/core/sched/scheduler.py (v0.22.1).

vLLM asks every waiting request at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from math import inf

from minivllm.core.lora_admission import LoRAAdmission
from minivllm.core.output import MAX_LORAS, NO_BLOCKS, SchedulerOutput, Skip
from minivllm.core.request import Request
from minivllm.core.waiting_queue import WaitingQueue

# A place in line: (0, a key of `WaitingQueue.passed_over`), then (1, an arrival).
Place = tuple[int, object]
START: Place = (0, (-1, -1))
END: Place = (1, inf)


class Line:
    """Waiting requests in line: one of each adapter that was passed over, the longest wait first, then all others
    by arrival. The one is its adapter's oldest, so that within an adapter the first to come is the first served.

    Only those are asked whose answer is not known. Who does not join answers for all of its adapter behind it. An
    adapter that waits already is asked if a slot is free, or if it has one. So a step costs what it admits,
    however many wait.

    It holds for one step, and is read once. Before the next is read, the last may be admitted or passed over.
    """

    def __init__(self, waiting: WaitingQueue, lora: LoRAAdmission) -> None:
        self.waiting = waiting
        self.lora = lora
        self._num_others = len(waiting) - len(waiting.passed_over)
        self._joined: set[int] = (
            set()
        )  # they were passed over, and their oldest has joined: the others are by arrival
        self._before, self._place = START, START  # of who was asked last, and who before
        self._last: Request | None = None
        self._reasons: dict[int, str] = {}  # adapter -> why the last of it who was asked did not join

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
        """Adapters that were passed over and have a slot, or find one free, the longest wait first."""
        asked = set()
        for adapter_id in self.waiting.longest_wait_first():
            if len(self.lora.taken) >= self.lora.max_loras:
                break
            if adapter_id not in asked:  # its next request is met here, once the oldest has joined
                asked.add(adapter_id)
                yield adapter_id
        with_a_slot = [a for a in self.lora.taken - asked if self.waiting.place(a)]
        yield from sorted(with_a_slot, key=self.waiting.place)

    def _next_arrival(self, arrival: int) -> int | None:
        """The next by arrival of adapters that do not wait, and of those whose oldest has joined."""
        oldest = [self.waiting.oldest(adapter_id) for adapter_id in self._joined]
        arrivals = [request.arrival_order for request in oldest if request is not None]
        fresh = self.waiting.fresh.next_after(arrival)
        return min(arrivals if fresh is None else [*arrivals, fresh], default=None)

    # Who was passed over, whether asked or not.

    def skip(self, request: Request, reason: str) -> None:
        """Who was asked last cannot join, nor can any of its adapter behind it."""
        if self._place != END:
            self._reasons[request.adapter_id] = reason

    def tell_skips(
        self, output: SchedulerOutput, most: int, held_back: Callable[[Request], str | None]
    ) -> None:
        """Say how many were passed over, asked or not, and name the first of them, `most` at most."""
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
        """Who waits and stands in line up to a place. Adapters passed over whose oldest came late come last."""
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
            # Who joined has left its place to the next of its adapter, which is in line by arrival.
            again = sum(place > last for place in places)
            return self._num_others + self.waiting.passed_over.num_after(last) - again
        again = sum(arrival > last for _, arrival in places)
        asked_before = self.waiting.passed_over_arrivals.num_after(last) - again
        return self.waiting.arrivals.num_after(last) - asked_before
