"""Replicas behind a router, on one virtual clock."""

from __future__ import annotations

from labs.kit.overlay import Todo
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

from minivllm.policies.routing import RoutingPolicy
from minivllm.simulate.adapters import AdapterSize
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.replica import Replica, ReplicaConfig, Served
from minivllm.simulate.traffic import Arrival


class Fleet:
    """Serves arrivals in the order of their times. What happens at the same time happens in a fixed order.

    requests   as they arrived, with what became of them
    now        seconds: of the last event
    """

    def __init__(
        self,
        config: ReplicaConfig,
        cost: CostModel,
        adapters: Mapping[int, AdapterSize],
        route: RoutingPolicy,
        replicas: int = 1,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"a fleet has at least one replica, got {replicas}")
        self.replicas = [Replica(number, config, cost, adapters) for number in range(replicas)]
        self.route = route
        self.now = 0.0
        self.requests: list[Served] = []
        # (time, number of the event, replica): the end of its step, or when it wakes.
        self._events: list[tuple[float, int, int]] = []
        self._num_events = 0
        self._event_of: list[int | None] = [None] * replicas  # the only event of each that still counts
        self._latest_s = 0.0  # of all arrivals

    # region lab 10.1: a clock that jumps
    def serve(
        self, arrivals: Iterable[Arrival], progress: Callable[[int], object] = lambda done: None
    ) -> None:
        """Serve them all, to the last token.   progress: called after every 100th, with their number

        `now` is always the time of what happens: an arrival, or an event. One that comes at the very time of an event
        comes before it.
        """
        raise Todo("lab 10.1: a clock that jumps")

    def _next_event(self) -> None:
        """Take the earliest event, the one that was scheduled first of several. Nothing if it counts no more.

        The step that runs has ended. The next one begins, and ends so many seconds later (`Replica.begin_step`). Where
        none can run the replica has an event when it wakes, if it does (`Replica.wakes_at`).
        """
        raise Todo("lab 10.1: a clock that jumps")

    # endregion

    def _arrive(self, arrival: Arrival) -> None:
        """Now. A replica in a step looks when it ends; another one looks at once, which is an event, too.

        ValueError for a time before the arrival before, or none at all.
        """
        if not self._latest_s <= arrival.time_s < float("inf"):
            raise ValueError(
                f"arrivals must be in the order of their times, from 0 on: {arrival.time_s} came after "
                f"{self._latest_s}; sort them"
            )
        self._latest_s = arrival.time_s
        adapter_id = 0 if arrival.adapter is None else arrival.adapter + 1
        number = self.route(adapter_id, self.replicas) if len(self.replicas) > 1 else 0
        replica = self.replicas[number]
        self.requests.append(replica.add(arrival))
        if replica.output is None:
            self._schedule_event(number, self.now)  # others may come at the same time

    def _schedule_event(self, number: int, time: float) -> None:
        """The replica's next event. One that it had before counts no more."""
        self._num_events += 1
        self._event_of[number] = self._num_events
        heapq.heappush(self._events, (time, self._num_events, number))


def adapters_of_ranks(ranks: Sequence[int], bytes_per_rank: float) -> dict[int, AdapterSize]:
    """Adapter id, from 1, -> size."""
    return {n: AdapterSize(rank, int(rank * bytes_per_rank)) for n, rank in enumerate(ranks, 1)}
