"""Open exercise of phase 11: which of several engines gets a request, where adapters are of mixed ranks."""

import heapq
from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import NamedTuple

from labs.kit.judges import Refused
from minivllm.policies.routing import (
    AdapterAffine,
    BoundedLoads,
    ConsistentHashing,
    RoutingPolicy,
    least_loaded,
)

TITLE = "which of several engines: less waiting than affine routing has"
UNIT = "of affine routing's seconds beyond the least that is possible"
BUDGET = 0.8

ENGINES, MEMORY = 4, 320  # ranks that an engine's memory has room for
ADAPTERS, REQUESTS = 40, 12_000
MS_TO_SERVE, MS_TO_READ = 40.0, 2.6  # a request; each rank: 5.2 MB at 2 GB/s
MS_BETWEEN = 16.0  # requests, in the mean


class Traffic(NamedTuple):
    """uses: (ms at which it comes, adapter) of each request; ranks: by adapter id"""

    uses: list[tuple[float, int]]
    ranks: dict[int, int]


class Seen(NamedTuple):
    """What a policy may know of an engine, by the names of `minivllm.policies.routing.Engine`, too.

    unfinished   an answer's word for its load, since rules take `.load` for that of PyTorch
    """

    load: int
    has: Callable[[int], bool]

    unfinished = property(lambda self: self.load)


class Bill(NamedTuple):
    """reads: from disk; busiest: requests of the engine that got most; ms: from coming to end, of all requests"""

    reads: int
    busiest: int
    ms: float


class OneEngine:
    """It serves requests one by one, in the order in which they come. Who lacks the adapter reads it first.

    held   what is in memory after all that was sent to it, the least recently used first
    ends   when each of its unfinished requests ends, in order
    """

    def __init__(self, ranks: dict[int, int]) -> None:
        self.ranks = ranks
        self.held: dict[int, None] = {}
        self.ends: list[float] = []
        self.free, self.served, self.reads = 0.0, 0, 0

    def seen(self, now: float) -> Seen:
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return Seen(len(self.ends), frozenset(self.held).__contains__)

    def serve(self, adapter: int, now: float) -> float:
        """When the request ends."""
        is_held = adapter in self.held
        self.held.pop(adapter, None)
        while sum(map(self.ranks.get, self.held)) + self.ranks[adapter] > MEMORY:
            del self.held[next(iter(self.held))]
        self.held[adapter] = None
        read = 0.0 if is_held else MS_TO_READ * self.ranks[adapter]
        self.free = max(now, self.free) + read + MS_TO_SERVE
        self.served, self.reads = self.served + 1, self.reads + (not is_held)
        heapq.heappush(self.ends, self.free)
        return self.free


def traffic_of(rng: Random) -> Traffic:
    """Ranks have nothing to do with popularity, which drifts. Now and then one adapter is hot."""
    ids = rng.sample(range(1, 1000), ADAPTERS)
    ranks = dict(zip(sorted(ids), rng.sample([8, 16, 32, 64] * (ADAPTERS // 4), ADAPTERS)))
    weights = [1 / (place + 1) for place in range(ADAPTERS)]
    uses: list[tuple[float, int]] = []
    now = 0.0
    while len(uses) < REQUESTS:
        hot, heat = rng.choice(ids), rng.choice((0.0, 0.0, 0.4))
        for adapter in rng.choices(ids, weights, k=rng.randint(150, 300)):
            now += rng.expovariate(1 / MS_BETWEEN)
            uses.append((now, hot if rng.random() < heat else adapter))
        a, b = rng.randrange(8), rng.randrange(ADAPTERS)
        ids[a], ids[b] = ids[b], ids[a]
    return Traffic(uses[:REQUESTS], ranks)


def serve(route: RoutingPolicy, traffic: Traffic, engines: int = ENGINES) -> Bill:
    """The bill of a policy, which gives the number of an engine for each request."""
    fleet = [OneEngine(traffic.ranks) for _ in range(engines)]
    ms = 0.0
    for now, adapter in traffic.uses:
        number = route(adapter, tuple(engine.seen(now) for engine in fleet))
        if number not in range(engines):
            raise Refused(f"choose() gave {number!r}, and engines are 0 to {engines - 1}")
        ms += fleet[number].serve(adapter, now) - now
    return Bill(sum(engine.reads for engine in fleet), max(engine.served for engine in fleet), ms)


def least_possible(traffic: Traffic, engines: int = ENGINES) -> float:
    """Milliseconds that no policy goes below: nothing is ever read, and whoever is free takes who waits longest.

    All requests take the same time then, so no other order would be shorter.
    """
    free, ms = [0.0] * engines, 0.0
    for now, _ in traffic.uses:
        end = max(now, free[0]) + MS_TO_SERVE
        heapq.heapreplace(free, end)
        ms += end - now
    return ms


KNOWN: dict[str, Callable[[], RoutingPolicy]] = {
    "least loaded": lambda: least_loaded,
    "hashing": ConsistentHashing,
    "bounded hashing": BoundedLoads,
    "affine": AdapterAffine,
}


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """1 is affine routing, 0 is the least that is possible."""
    policy, traffic = load().Policy, traffic_of(rng)
    return share(serve(policy(dict(traffic.ranks)).choose, traffic), traffic)


def share(bill: Bill, traffic: Traffic) -> float:
    """(the bill's milliseconds - the least) / (affine routing's - the least)."""
    least = least_possible(traffic)
    return (bill.ms - least) / (serve(AdapterAffine(), traffic).ms - least)


def beside(rng: Random) -> list[str]:
    """What policies that have a name come to on the same input, and the least that is possible: a line each."""
    traffic = traffic_of(rng)
    bills = {name: serve(make(), traffic) for name, make in KNOWN.items()}
    least = f"{0:10.4g}  nothing to read, one queue: {least_possible(traffic) / 1e3:,.0f} s"
    return [*(_line(name, bill, share(bill, traffic)) for name, bill in bills.items()), least]


def _line(name: str, bill: Bill, share: float) -> str:
    spread = f"{bill.reads:,} reads, {bill.busiest:,} requests on one"
    return f"{share:10.4g}  {name}: {spread}, {bill.ms / 1e3:,.0f} s"
