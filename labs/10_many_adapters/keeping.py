"""Which adapter leaves a full tier: slots, or memory. vLLM (v0.22.1) has the least recently used (vllm/utils/cache.py).

A policy hears of every use, and is asked which key to evict. It knows keys alone: adapter ids.
"""

from labs.kit.overlay import Todo
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from minivllm.lora.lru_cache import LRUCache

V = TypeVar("V")


class KeepPolicy(Protocol):
    """Who stays in one tier."""

    def used(self, key: int) -> None:
        """A key has come in, or was used again."""

    def left(self, key: int) -> None:
        """A key is gone, on whosever order."""

    def victim(self, candidates: Sequence[int]) -> int:
        """Which of these has to go; the least recently used is first. There is at least one."""


class PolicyCache(LRUCache[V]):
    """A cache that forgets whom its policy names."""

    def __init__(self, capacity: int, policy: KeepPolicy) -> None:
        super().__init__(capacity)
        self.policy = policy

    def touch(self, key: int) -> None:
        super().touch(key)
        self.policy.used(key)

    def pop(self, key: int, *default: V) -> V:
        self.policy.left(key)
        return super().pop(key, *default)

    def remove_oldest(self, spare: Collection[int] = ()) -> tuple[int, V]:
        candidates = [key for key in self if key not in spare]
        if not candidates:
            return super().remove_oldest(spare)  # which says what is wrong
        victim = self.policy.victim(candidates)
        return victim, self.pop(victim)


class LeastRecentlyUsed:
    """What the engine does by itself."""

    def used(self, key: int) -> None:
        """The cache keeps the order."""

    left = used

    def victim(self, candidates: Sequence[int]) -> int:
        return candidates[0]


class LeastFrequentlyUsed:
    """The key with the fewest uses since it came goes; of several, the least recently used."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}

    def used(self, key: int) -> None:
        self.uses[key] = self.uses.get(key, 0) + 1

    def left(self, key: int) -> None:
        self.uses.pop(key, None)

    def victim(self, candidates: Sequence[int]) -> int:
        return min(candidates, key=self.uses.__getitem__)  # the first of several


class GreedyDualSizeFrequency:
    """The key that is worth least goes. Cherkasova, "Improving WWW Proxies Performance with GDSF", HP Labs 1998.

    Worth is `uses * cost / size`, and the `clock` of the last use. The clock is the worth of the victim that was chosen
    last; who leaves on another's order does not move it. So what was worth much once does not stay for ever.
    Of several keys that are worth least, the least recently used goes: it is the first of the candidates.

    Of a key that has left nothing is kept. `cost` and `size` are asked at each use: an adapter that is read again, or
    another one under the same id, may have others.

    cost    key -> what it takes to bring it back, such as bytes to read
    size    key -> what it takes up. Tiers count adapters, so it is 1 of each unless somebody knows better
    """

    def __init__(self, cost: Callable[[int], float], size: Callable[[int], float] = lambda key: 1.0) -> None:
        self.cost, self.size = cost, size
        self.clock = 0.0
        self.uses: dict[int, int] = {}
        self.worth: dict[int, float] = {}

    # region lab 10.2: greedy dual size frequency
    def used(self, key: int) -> None:
        raise Todo("lab 10.2: greedy dual size frequency")

    def left(self, key: int) -> None:
        raise Todo("lab 10.2: greedy dual size frequency")

    def victim(self, candidates: Sequence[int]) -> int:
        raise Todo("lab 10.2: greedy dual size frequency")

    # endregion


# Name -> what makes a policy for one tier. Its argument is what bringing an adapter back costs.
POLICIES: dict[str, Callable[[Callable[[int], float]], KeepPolicy]] = {
    "lru": lambda cost: LeastRecentlyUsed(),
    "lfu": lambda cost: LeastFrequentlyUsed(),
    "gdsf": GreedyDualSizeFrequency,
}
