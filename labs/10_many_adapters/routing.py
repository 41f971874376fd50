"""Which engine of several gets a request. Nothing in vLLM (v0.22.1) knows of adapters there.

A policy is called with a request to come and the engines, and gives the number of one.
"""

from labs.kit.overlay import Todo
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol


class Engine(Protocol):
    """What a policy may ask of an engine.   load: its unfinished requests"""

    load: int

    def has(self, adapter_id: int) -> bool:
        """Whether the adapter is in a slot or in memory, or about to be."""


# (adapter id, 0 for base; engines) -> the number of the engine that gets the request.
RoutingPolicy = Callable[[int, Sequence[Engine]], int]


def least_loaded(adapter_id: int, engines: Sequence[Engine]) -> int:
    """The replica with the fewest unfinished requests, the first of several."""
    return min(range(len(engines)), key=lambda number: engines[number].load)


class Random:
    """Any, each as likely as another; the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def __call__(self, adapter_id: int, engines: Sequence[Engine]) -> int:
        return self._random.randrange(len(engines))


def place_of(text: str) -> int:
    """A place on a ring of 2**64, which depends on the text alone: the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class ConsistentHashing:
    """Each adapter has a home. With one engine more, few adapters move. Karger et al., STOC 1997.

    points   of each engine on the ring: many even out how many adapters each has
    """

    def __init__(self, points: int = 64) -> None:
        self.points = points
        self._ring: list[tuple[int, int]] = []  # (place, engine)
        self._num_engines = 0

    def __call__(self, adapter_id: int, engines: Sequence[Engine]) -> int:
        return (
            least_loaded(adapter_id, engines) if not adapter_id else self.homes(adapter_id, len(engines))[0]
        )

    # region lab 10.5: homes on a ring
    def homes(self, adapter_id: int, num_engines: int) -> list[int]:
        """All engines, in the order in which the first point of each comes behind the adapter's place on the ring.

        Point p of engine n is at `place_of(f"engine {n}, point {p}")`, an adapter at `place_of(f"adapter {id}")`. After
        the last point comes the first. `_ring` is made anew only for another number of engines than `_num_engines`.
        """
        raise Todo("lab 10.5: homes on a ring")

    # endregion


class BoundedLoads(ConsistentHashing):
    """The first home that is not full. Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads".

    most   a full engine has so many times the mean of all loads, the request that comes counted; > 1
    """

    def __init__(self, most: float = 1.25, points: int = 64) -> None:
        super().__init__(points)
        self.most = most

    # region lab 10.5: the first home that is not full
    def __call__(self, adapter_id: int, engines: Sequence[Engine]) -> int:
        """The first home whose load is below `most` times the mean. For base, which is everywhere: the least loaded."""
        raise Todo("lab 10.5: the first home that is not full")

    # endregion


class AdapterAffine:
    """The least loaded of those that have the adapter, unless another one has far less to do.
    An adapter that no replica has goes to equally loaded ones round robin: a single replica would evict one such
    adapter for the next.

    spill   requests by which it may be ahead of the least loaded of all
    """

    def __init__(self, spill: int = 8) -> None:
        self.spill, self._turns = spill, {}

    def __call__(self, adapter_id: int, engines: Sequence[Engine]) -> int:
        quietest = min(range(len(engines)), key=lambda n: (engines[n].load, self._turns.get(n, 0)))
        having = [number for number, engine in enumerate(engines) if adapter_id and engine.has(adapter_id)]
        if not having:
            self._turns[quietest] = 1 + max(self._turns.values(), default=0)
            return quietest
        nearest = min(having, key=lambda number: engines[number].load)
        return nearest if engines[nearest].load <= engines[quietest].load + self.spill else quietest


# Name -> what makes a policy for a fleet, from a seed.
POLICIES: dict[str, Callable[[int], RoutingPolicy]] = {
    "random": Random,
    "least-loaded": lambda seed: least_loaded,
    "hashing": lambda seed: ConsistentHashing(),
    "bounded-hashing": lambda seed: BoundedLoads(),
    "affine": lambda seed: AdapterAffine(),
}
