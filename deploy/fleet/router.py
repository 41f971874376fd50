"""Routing of a fleet by the policies that docs/scaling.md compares, in the stead of Ray Serve's own."""

from collections import OrderedDict
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from minivllm.lora.io.resolver import stable_id
from minivllm.policies.routing import POLICIES


class Seen:
    """A replica as a policy sees it (`minivllm.policies.routing.Engine`).

    recent   the adapters that were last sent there, as many as it has slots: those it has
    """

    def __init__(self, slots: int) -> None:
        self.slots, self.load = slots, 0
        self.recent: OrderedDict[int, None] = OrderedDict()

    def has(self, adapter_id: int) -> bool:
        return adapter_id in self.recent

    def send(self, adapter_id: int) -> None:
        """It gets a request for the adapter."""
        self.recent[adapter_id] = None
        self.recent.move_to_end(adapter_id)
        if len(self.recent) > self.slots:
            self.recent.popitem(last=False)


class PolicyRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """The replica that a policy names; where that one is full, any other.

    All requests of a fleet pass one router, that of its server, so what it remembers is all there is to know. A
    replica has a seat, and one that comes for another that has ended takes over its seat: homes stay where they are.
    """

    def initialize_state(self, policy: str, slots: int) -> None:
        """policy: a name in `minivllm.policies.routing.POLICIES`; slots: of each engine"""
        self._policy, self._slots = POLICIES[policy](0), slots
        self._seats: list[ReplicaID] = []
        self._seen: dict[ReplicaID, Seen] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._seats = seated(self._seats, [replica.replica_id for replica in replicas])
        self._seen = {each: self._seen.get(each) or Seen(self._slots) for each in self._seats}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks: the second is for when the first is full."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        seats = [each for each in self._seats if each in replicas]
        if pending_request is None or not seats:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        for each in seats:
            self._seen[each].load = self.replica_queue_len_cache.get(each) or 0
        number = self._policy(adapter_of(pending_request), [self._seen[each] for each in seats])
        first = replicas.pop(seats[number])
        return [[first], list(replicas.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (adapter_id := adapter_of(pending_request)) and replica_id in self._seen:
            self._seen[replica_id].send(adapter_id)


def adapter_of(request: PendingRequest) -> int:
    """The id that policies know its adapter by; 0 for the base model."""
    name = request.metadata.multiplexed_model_id
    return stable_id(name) if name else 0


def seated(seats: list[Any], present: list[Any]) -> list[Any]:
    """Who sits where: who was there keeps the seat, who is new takes a free one before there are more of them."""
    new = sorted((each for each in present if each not in seats), key=str)
    kept = [each if each in present else (new.pop(0) if new else None) for each in seats]
    return [each for each in kept if each is not None] + new
