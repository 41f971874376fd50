"""Engines as routing policies see them: who sits where, and which adapters each was sent last."""

from collections import OrderedDict
from collections.abc import Collection, Hashable

from minivllm.policies.routing import RoutingPolicy


class Seat:
    """An engine (`minivllm.policies.routing.Engine`).

    load     its unfinished requests, as far as anybody knows
    recent   the adapters that were last sent there, as many as its memory holds: those it has
    """

    def __init__(self, room: int) -> None:
        self.room, self.load = room, 0
        self.recent: OrderedDict[int, None] = OrderedDict()

    def has(self, adapter_id: int) -> bool:
        return adapter_id in self.recent

    def send(self, adapter_id: int) -> None:
        """It gets a request for the adapter; 0 is base."""
        if adapter_id:
            self.recent[adapter_id] = None
            self.recent.move_to_end(adapter_id)
        if len(self.recent) > self.room:
            self.recent.popitem(last=False)


class Seats:
    """Engines in the order in which they came. When one ends, those after it move up: adapters that hash to them get
    another home once.

    room   for adapters, in the memory of each
    of     name of an engine -> its seat; in order
    """

    def __init__(self, policy: RoutingPolicy, room: int) -> None:
        self.policy, self.room = policy, room
        self.of: dict[Hashable, Seat] = {}

    def update(self, present: Collection[Hashable]) -> None:
        """These engines are there now."""
        names = [name for name in self.of if name in present]
        names += sorted((name for name in present if name not in self.of), key=str)
        self.of = {name: self.of.get(name) or Seat(self.room) for name in names}

    def choose(self, adapter_id: int, among: Collection[Hashable]) -> Hashable:
        """Who gets a request for the adapter; 0 is base.   among: engines that have seats, one at least"""
        names = [name for name in self.of if name in among]
        return names[self.policy(adapter_id, [self.of[name] for name in names])]
