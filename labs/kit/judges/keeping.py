"""Open exercise of phase 10: who is kept in slots and in memory, so that little is read and copied."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from labs.kit.judges import Refused
from minivllm.policies.keeping import GreedyDualSizeFrequency, LeastFrequentlyUsed, LeastRecentlyUsed

TITLE = "who is kept: less to read and to copy than GDSF has"
UNIT = "of GDSF's milliseconds beyond the least that is possible"
BUDGET = 0.95

SLOTS, MEMORY = 8, 32
ADAPTERS, REQUESTS = 300, 6000
MS_TO_READ, MS_TO_COPY = 2.6, 0.12  # for each rank: 5.2 MB at 2 and at 43 GB/s

Cost = Callable[[int], float]


class Bill(NamedTuple):
    """What was read from disk and copied into slots, and how long all of it takes."""

    reads: int
    copies: int
    ms: float


class Traffic(NamedTuple):
    """uses: adapter ids by request; ranks: by adapter id"""

    uses: list[int]
    ranks: dict[int, int]

    def to_read(self, adapter: int) -> float:
        return MS_TO_READ * self.ranks[adapter]

    def to_copy(self, adapter: int) -> float:
        return MS_TO_COPY * self.ranks[adapter]


def traffic_of(rng: Random) -> Traffic:
    """Popularity that drifts, an adapter that is hot for a while, and now and then a sweep over some that come once."""
    ids = rng.sample(range(1, 10_000), ADAPTERS)
    weights = [1 / (place + 1) ** 1.1 for place in range(ADAPTERS)]
    uses: list[int] = []
    once = 10_000
    while len(uses) < REQUESTS:
        hot = rng.choice(ids)
        for adapter in rng.choices(ids, weights, k=rng.randint(60, 140)):
            uses.append(hot if rng.random() < 0.2 else adapter)
        length = rng.randint(5, 30)
        uses += range(once, once + length)
        once += length
        a, b = rng.randrange(MEMORY), rng.randrange(ADAPTERS)
        ids[a], ids[b] = ids[b], ids[a]
    uses = uses[:REQUESTS]
    return Traffic(uses, {adapter: rng.choice((8, 16, 32, 64)) for adapter in sorted(set(uses))})


class Tier:
    """Places for adapters. A policy of its own says who leaves when all are taken."""

    def __init__(self, places: int, policy: Any) -> None:
        self.places, self.policy = places, policy
        self.held: dict[int, None] = {}  # the least recently used first

    def use(self, adapter: int) -> tuple[bool, int | None]:
        """Whether the adapter was not there, and who had to leave for it."""
        is_new, gone = adapter not in self.held, None
        if is_new and len(self.held) == self.places:
            gone = self.policy.victim(tuple(self.held))
            if gone not in self.held:
                raise Refused(f"victim() gave {gone!r}, which is not there; there are {sorted(self.held)}")
            self.drop(gone)
        self.held.pop(adapter, None)
        self.held[adapter] = None
        self.policy.used(adapter)
        return is_new, gone

    def drop(self, adapter: int) -> None:
        if adapter in self.held:
            del self.held[adapter]
            self.policy.left(adapter)


def serve(make: Callable[[Cost], Any], traffic: Traffic) -> Bill:
    """The bill of a policy. What leaves memory leaves its slot as well."""
    memory, slots = Tier(MEMORY, make(traffic.to_read)), Tier(SLOTS, make(traffic.to_copy))
    reads = copies = 0
    ms = 0.0
    for adapter in traffic.uses:
        is_read, gone = memory.use(adapter)
        if gone is not None:
            slots.drop(gone)
        is_copied, _ = slots.use(adapter)
        reads, copies = reads + is_read, copies + is_copied
        ms += is_read * traffic.to_read(adapter) + is_copied * traffic.to_copy(adapter)
    return Bill(reads, copies, ms)


def least_cost(uses: Sequence[int], places: int, cost: Cost) -> float:
    """The least that any policy of one tier pays, by who knows the future: Belady's bound, where costs differ.

    To keep an adapter from one use to the next saves its cost, and takes a place for all uses between. The one that is
    used has a place in any case. So the most that is saved is a flow through time, of as many units as other places.
    """
    last: dict[int, int] = {}
    saved, spans = 0.0, []
    for now, adapter in enumerate(uses):
        if adapter in last and last[adapter] == now - 1:
            saved += cost(adapter)  # nobody was between
        elif adapter in last:
            spans.append((last[adapter] + 1, now, cost(adapter)))
        last[adapter] = now
    return sum(map(cost, uses)) - saved - most_saved(spans, places - 1)


def most_saved(spans: Sequence[tuple[int, int, float]], units: int) -> float:
    """The most that spans (begin, end, worth) are worth of which at most `units` overlap: a flow of least cost."""
    nodes = {time: n for n, time in enumerate(sorted({time for span in spans for time in span[:2]}))}
    ways: list[list[Way]] = [[] for _ in nodes]
    for a, b in pairwise(range(len(nodes))):
        join(ways, a, b, units, 0.0)
    for begin, end, worth in spans:
        join(ways, nodes[begin], nodes[end], 1, -worth)
    least = [0.0] * len(
        nodes
    )  # the least cost from the first node, so that no way looks cheaper than nothing
    for a, leaving in enumerate(ways):
        for way in leaving:
            if way.to > a:
                least[way.to] = min(least[way.to], least[a] + way.cost)
    return sum(_one_more(ways, least) for _ in range(units if spans else 0))


@dataclass
class Way:
    """room: units that may still go; back: the way back, which has room for those that went"""

    to: int
    room: int
    cost: float
    back: "Way | None" = field(default=None, repr=False)


def join(ways: list[list[Way]], a: int, b: int, room: int, cost: float) -> None:
    there, back = Way(b, room, cost), Way(a, 0, -cost)
    there.back, back.back = back, there
    ways[a].append(there)
    ways[b].append(back)


def _one_more(ways: list[list[Way]], least: list[float]) -> float:
    """Send one more unit from the first node to the last, the cheapest way there is; what it saves."""
    far, came = [float("inf")] * len(ways), [ways[0][0]] * len(ways)
    far[0] = 0.0
    heap = [(0.0, 0)]
    while heap:
        distance, a = heapq.heappop(heap)
        for way in ways[a] if distance == far[a] else ():
            reached = distance + way.cost + least[a] - least[way.to]
            if way.room and reached < far[way.to] - 1e-9:
                far[way.to], came[way.to] = reached, way
                heapq.heappush(heap, (reached, way.to))
    least[:] = [known + distance for known, distance in zip(least, far)]
    at = len(ways) - 1
    while at:
        came[at].room -= 1
        came[at].back.room += 1
        at = came[at].back.to
    return -least[-1]


def least_possible(traffic: Traffic) -> float:
    """Milliseconds that no policy goes below: of each tier by itself."""
    return least_cost(traffic.uses, MEMORY, traffic.to_read) + least_cost(
        traffic.uses, SLOTS, traffic.to_copy
    )


KNOWN = {
    "LRU": lambda cost: LeastRecentlyUsed(),
    "LFU": lambda cost: LeastFrequentlyUsed(),
    "GDSF": GreedyDualSizeFrequency,
}


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """1 is GDSF, 0 is who knows the future."""
    policy, traffic = load().Policy, traffic_of(rng)
    return share(serve(policy, traffic), traffic)


def share(bill: Bill, traffic: Traffic) -> float:
    """(the bill's milliseconds - the least) / (GDSF's - the least)."""
    least = least_possible(traffic)
    return (bill.ms - least) / (serve(KNOWN["GDSF"], traffic).ms - least)


def beside(rng: Random) -> list[str]:
    """What policies that have a name come to on the same input, and the least that is possible: a line each."""
    traffic = traffic_of(rng)
    bills = {name: serve(make, traffic) for name, make in KNOWN.items()}
    lines = [
        f"{share(bill, traffic):10.4g}  {name}: {bill.reads:,} reads, {bill.copies:,} copies, {bill.ms / 1e3:.0f} s"
        for name, bill in bills.items()
    ]
    return [*lines, f"{0:10.4g}  Belady, by cost, in each tier: {least_possible(traffic) / 1e3:.0f} s"]
