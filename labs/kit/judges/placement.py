"""Open exercise of phase 10: on which of several engines each adapter is placed, by what is asked for."""

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from labs.kit.judges import Refused, routing
from labs.kit.judges.routing import ENGINES, MEMORY, MS_TO_SERVE, Traffic, traffic_of

TITLE = "on which engines each adapter is placed: replicas by demand that do not flap"
UNIT = "of the seconds beyond the least that is possible which one engine an adapter has"
BUDGET = 0.4

PERIOD = 2000.0  # ms from one placement to the next
BUSY = 0.5  # share of an engine that a replica of `Afresh` takes

Placement = Mapping[int, Sequence[int]]  # adapter -> its engines


class Bill(NamedTuple):
    """reads: from disk; moves: engines that adapters were newly placed on, after the first time; ms: of all requests"""

    reads: int
    moves: int
    ms: float


class Router:
    """A route for `routing.serve`: the adapter's engine with the fewest requests, by what a policy placed last."""

    def __init__(self, policy: Any, traffic: Traffic, engines: int = ENGINES) -> None:
        self.policy, self.traffic, self.engines = policy, traffic, engines
        self.placed: dict[int, tuple[int, ...]] = {}
        self.counts = dict.fromkeys(traffic.ranks, 0)
        self.moves, self._next, self._times = 0, 0.0, iter(traffic.uses)

    def __call__(self, adapter: int, engines: Sequence[Any]) -> int:
        now, _ = next(self._times)
        while now >= self._next:
            self._place(self._next)
            self._next += PERIOD
        self.counts[adapter] += 1
        return min(self.placed[adapter], key=lambda number: engines[number].load)

    def _place(self, now: float) -> None:
        found = self.policy.place(now, dict(self.counts), dict(self.placed))
        placed = {adapter: tuple(dict.fromkeys(found.get(adapter) or ())) for adapter in self.traffic.ranks}
        for adapter, numbers in placed.items():
            if not numbers or not all(n in range(self.engines) for n in numbers):
                known = f"and it needs one or more of 0 to {self.engines - 1}"
                raise Refused(f"place() gave adapter {adapter} the engines {numbers!r:.60}, {known}")
        if self.placed:
            self.moves += sum(len(set(placed[a]) - set(self.placed[a])) for a in placed)
        self.placed, self.counts = placed, dict.fromkeys(self.counts, 0)


def serve(policy: Any, traffic: Traffic) -> Bill:
    """The bill of a policy."""
    router = Router(policy, traffic)
    bill = routing.serve(router, traffic)
    return Bill(bill.reads, router.moves, bill.ms)


class Afresh:
    """As many replicas as the demand of the last period takes, placed anew: the busiest first, where least is."""

    def __init__(self, ranks: Mapping[int, int], engines: int, memory: int) -> None:
        self.ranks, self.engines = ranks, engines

    def place(self, now: float, counts: Mapping[int, int], placed: Placement) -> Placement:
        work = {adapter: counts[adapter] * MS_TO_SERVE / PERIOD for adapter in self.ranks}
        share, found = [0.0] * self.engines, {}
        for adapter in sorted(work, key=work.__getitem__, reverse=True):
            replicas = min(self.engines, max(1, math.ceil(work[adapter] / BUSY)))
            found[adapter] = sorted(range(self.engines), key=share.__getitem__)[:replicas]
            for number in found[adapter]:
                share[number] += (work[adapter] + 1e-3) / replicas
        return found


class Everywhere:
    """Every adapter on every engine: what routing by load alone is."""

    def __init__(self, ranks: Mapping[int, int], engines: int, memory: int) -> None:
        self.ranks, self.engines = ranks, engines

    def place(self, now: float, counts: Mapping[int, int], placed: Placement) -> Placement:
        return dict.fromkeys(self.ranks, range(self.engines))


class OneEach:
    """Every adapter on one engine, which never changes."""

    def __init__(self, ranks: Mapping[int, int], engines: int, memory: int) -> None:
        self.home = {adapter: [n % engines] for n, adapter in enumerate(sorted(ranks))}

    def place(self, now: float, counts: Mapping[int, int], placed: Placement) -> Placement:
        return self.home


KNOWN: dict[str, Callable[..., Any]] = {
    "everywhere": Everywhere,
    "anew each time": Afresh,
    "one engine each": OneEach,
}


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """1 is one engine for each adapter, 0 is the least that is possible."""
    policy, traffic = load().Policy, traffic_of(rng)
    return share(serve(policy(dict(traffic.ranks), ENGINES, MEMORY), traffic), traffic)


def share(bill: Bill, traffic: Traffic) -> float:
    """(the bill's milliseconds - the least) / (those of one engine each - the least)."""
    least = routing.least_possible(traffic)
    return (bill.ms - least) / (serve(OneEach(traffic.ranks, ENGINES, MEMORY), traffic).ms - least)


def beside(rng: Random) -> list[str]:
    """What policies that have a name come to on the same input, and the least that is possible: a line each."""
    traffic = traffic_of(rng)
    bills = {name: serve(make(traffic.ranks, ENGINES, MEMORY), traffic) for name, make in KNOWN.items()}
    lines = [
        f"{share(bill, traffic):10.4g}  {name}: {bill.reads:,} reads, {bill.moves:,} moves, {bill.ms / 1e3:,.0f} s"
        for name, bill in bills.items()
    ]
    least = routing.least_possible(traffic)
    return [*lines, f"{0:10.4g}  nothing to read, one queue: {least / 1e3:,.0f} s"]
