"""Open exercise, phase 05: a score that each use adds one to and that fades; the smallest leaves.

Between LRU (fades at once) and LFU (never fades). No window to fill, and one number an adapter.
"""

import math

HALF_LIFE = 150  # requests


class Policy:
    """Scores are kept as they were at the last use: they fade alike, so only differences of time matter."""

    def __init__(self, slots: int) -> None:
        self.scores: dict[int, tuple[float, int]] = {}
        self.clock = 0
        self.fade = math.log(2) / HALF_LIFE

    def used(self, adapter: int) -> None:
        """One more, on top of what is left of the others."""
        self.clock += 1
        self.scores[adapter] = (self._now(adapter) + 1, self.clock)

    def victim(self, cached: tuple[int, ...], wanted: int) -> int:
        """The smallest score."""
        return min(cached, key=self._now)

    def _now(self, adapter: int) -> float:
        score, since = self.scores.get(adapter, (0.0, self.clock))
        return score * math.exp(self.fade * (since - self.clock))
