"""Routing of a fleet by the policies that docs/scaling.md compares, in the stead of Ray Serve's own."""

import time
from collections import Counter
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from deploy.fleet.seats import Seats
from minivllm.policies.routing import POLICIES
from minivllm.sources.resolver import stable_id

# Far more than it takes: a request that waits for room is chosen for again and again.
SECONDS_UNTIL_SENT = 10.0


class PolicyRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """The replica that a policy names; where that one is full, any other.

    All requests of a fleet pass one router, that of its server: what it remembers is all that there is to know. It
    counts by itself who has how many, since Serve's count lags behind when many requests come at once.
    """

    def initialize_state(self, policy: str, room: int) -> None:
        """policy: a name in `minivllm.policies.routing.POLICIES`; room: for adapters, in the memory of each engine"""
        self._seats = Seats(POLICIES[policy](0), room)
        # By id: not sent yet, and when it was chosen.
        self._chosen: dict[int, tuple[PendingRequest, ReplicaID, float]] = {}
        self._taken: Counter[ReplicaID] = Counter()  # requests that it has taken, and not ended

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._seats.update([replica.replica_id for replica in replicas])
        self._taken = Counter({name: self._taken[name] for name in self._seats.of})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks: the second is for when the first is full."""
        replicas = {each.replica_id: each for each in candidate_replicas if each.replica_id in self._seats.of}
        if pending_request is None or not replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        adapter_id = adapter_of(pending_request)
        self._count_loads(pending_request)
        name = self._seats.choose(adapter_id, list(replicas))
        self._seats.of[name].send(adapter_id)
        self._chosen[id(pending_request)] = pending_request, name, time.monotonic()
        first = replicas.pop(name)
        return [[first], list(replicas.values())]

    def _count_loads(self, pending_request: PendingRequest) -> None:
        """Without this request, which may be tried again, and those that were cancelled before they were sent."""
        self._chosen.pop(id(pending_request), None)
        since = time.monotonic() - SECONDS_UNTIL_SENT
        self._chosen = {
            key: each
            for key, each in self._chosen.items()
            if not each[0].future.cancelled() and each[2] > since
        }
        chosen = Counter(name for _, name, _ in self._chosen.values())
        for name, seat in self._seats.of.items():
            seat.load = self._taken[name] + chosen[name]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It may be another one than was chosen, if that was full."""
        self._chosen.pop(id(pending_request), None)
        if replica_id in self._seats.of:
            self._taken[replica_id] += 1
            self._seats.of[replica_id].send(adapter_of(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Also after a replica refused it, which is once too often; that is made good when it has none."""
        self._taken[replica_id] = max(0, self._taken[replica_id] - 1)


def adapter_of(request: PendingRequest) -> int:
    """The id that policies know its adapter by; 0 for the base model."""
    name = request.metadata.multiplexed_model_id
    return stable_id(name) if name else 0
