"""Replicas by demand with hysteresis: one more above a bound, one less far below it; and few adapters ever move."""

from collections.abc import Mapping, Sequence

BUSY = 40 / 2000  # share of an engine that a request takes
UP, DOWN = 0.3, 0.1  # of an engine, for each replica: above it there is one more, below it one less
GAP = 0.3  # of an engine, between the busiest and the idlest, that is left as it is


class Policy:
    """An adapter keeps its engines, but for a few that move from the busiest one to the idlest."""

    def __init__(self, ranks: Mapping[int, int], engines: int, memory: int) -> None:
        self.adapters, self.engines = sorted(ranks), engines

    def place(
        self, now: float, counts: Mapping[int, int], placed: Mapping[int, Sequence[int]]
    ) -> Mapping[int, Sequence[int]]:
        if not placed:
            return {adapter: [n % self.engines] for n, adapter in enumerate(self.adapters)}
        work = {adapter: counts[adapter] * BUSY for adapter in self.adapters}
        found = {adapter: list(placed[adapter]) for adapter in self.adapters}
        for adapter in sorted(self.adapters, key=lambda a: -work[a]):
            has = self._shares(found, work)
            own = found[adapter]
            while len(own) < self.engines and work[adapter] / len(own) > UP:
                own.append(min((n for n in range(self.engines) if n not in own), key=lambda n: has[n]))
            while len(own) > 1 and work[adapter] / (len(own) - 1) < DOWN:
                own.remove(max(own, key=lambda n: has[n]))
        for _ in range(8):
            has = self._shares(found, work)
            busiest, idlest = has.index(max(has)), has.index(min(has))
            gap = has[busiest] - has[idlest]
            movable = [a for a in self.adapters if found[a] == [busiest] and 0 < work[a] < gap]
            if gap < GAP or not movable:
                break
            found[min(movable, key=lambda a: abs(work[a] - gap / 2))] = [idlest]
        return found

    def _shares(self, found: Mapping[int, Sequence[int]], work: Mapping[int, float]) -> list[float]:
        """What each engine has to do."""
        shares = [0.0] * self.engines
        for adapter, own in found.items():
            for number in own:
                shares[number] += work[adapter] / len(own)
        return shares
