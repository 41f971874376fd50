"""Routing of a fleet by the policies that docs/scaling.md compares, in the stead of Ray Serve's own."""

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
from minivllm.lora.io.resolver import stable_id
from minivllm.policies.routing import POLICIES


class PolicyRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """The replica that a policy names; where that one is full, any other.

    All requests of a fleet pass one router, that of its server: what it remembers is all that there is to know.
    """

    def initialize_state(self, policy: str, room: int) -> None:
        """policy: a name in `minivllm.policies.routing.POLICIES`; room: for adapters, in the memory of each engine"""
        self._seats = Seats(POLICIES[policy](0), room)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._seats.update([replica.replica_id for replica in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks: the second is for when the first is full."""
        replicas = {each.replica_id: each for each in candidate_replicas if each.replica_id in self._seats.of}
        if pending_request is None or not replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        for name in replicas:
            self._seats.of[name].load = self.replica_queue_len_cache.get(name) or 0
        first = replicas.pop(self._seats.choose(adapter_of(pending_request), list(replicas)))
        return [[first], list(replicas.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if replica_id in self._seats.of:
            self._seats.of[replica_id].send(adapter_of(pending_request))


def adapter_of(request: PendingRequest) -> int:
    """The id that policies know its adapter by; 0 for the base model."""
    name = request.metadata.multiplexed_model_id
    return stable_id(name) if name else 0
