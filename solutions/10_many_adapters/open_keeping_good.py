"""GDSF that never forgets: uses count on when an adapter has left. A sweep has one use, for ever."""

from collections.abc import Callable, Sequence


class Policy:
    """Worth is uses times cost, and the clock of the last use, as in lab 10.2."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.cost, self.clock = cost, 0.0
        self.uses: dict[int, int] = {}
        self.worth: dict[int, float] = {}

    def used(self, adapter: int) -> None:
        self.uses[adapter] = self.uses.get(adapter, 0) + 1
        self.worth[adapter] = self.clock + self.uses[adapter] * self.cost(adapter)

    def left(self, adapter: int) -> None:
        self.worth.pop(adapter, None)

    def victim(self, candidates: Sequence[int]) -> int:
        victim = min(candidates, key=lambda adapter: self.worth[adapter])
        self.clock = self.worth[victim]
        return victim
