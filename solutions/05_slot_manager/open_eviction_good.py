"""Open exercise, phase 05: whoever was used least often in the last while leaves, LRU among equals.

What came once has a count of one, so a sweep drives out its own. Counts of long ago would keep what was popular then.
"""

from collections import Counter, deque

WINDOW = 800


class Policy:
    """Least frequently used over a window."""

    def __init__(self, slots: int) -> None:
        self.recent: deque[int] = deque()
        self.counts: Counter[int] = Counter()
        self.last_used: dict[int, int] = {}
        self.clock = 0

    def used(self, adapter: int) -> None:
        """Count it in, and whoever leaves the window out."""
        self.clock += 1
        self.last_used[adapter] = self.clock
        self.counts[adapter] += 1
        self.recent.append(adapter)
        if len(self.recent) > WINDOW:
            self.counts[self.recent.popleft()] -= 1

    def victim(self, cached: tuple[int, ...], wanted: int) -> int:
        """The least often used, then the least recently."""
        return min(cached, key=lambda adapter: (self.counts[adapter], self.last_used[adapter]))
