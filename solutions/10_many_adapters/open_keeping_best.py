"""How often an adapter is asked for these days: each use weighs half as much 300 requests later, also out of memory.

That is a rate. Times the cost it is what keeping an adapter saves by request, and the least of that leaves.
"""

from collections.abc import Callable, Sequence

HALF_LIFE = 300  # requests


class Policy:
    """The least cost by request leaves."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.cost, self.now = cost, 0
        self.weight: dict[int, float] = {}  # of all uses, at the last of them
        self.last: dict[int, int] = {}

    def used(self, adapter: int) -> None:
        self.now += 1
        self.weight[adapter] = 1 + self.weight_now(adapter)
        self.last[adapter] = self.now

    def left(self, adapter: int) -> None:
        """It may come back."""

    def victim(self, candidates: Sequence[int]) -> int:
        return min(candidates, key=lambda adapter: self.weight_now(adapter) * self.cost(adapter))

    def weight_now(self, adapter: int) -> float:
        since = self.now - self.last.get(adapter, self.now)
        return self.weight.get(adapter, 0.0) * 0.5 ** (since / HALF_LIFE)
