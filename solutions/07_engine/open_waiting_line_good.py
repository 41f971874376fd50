"""Open exercise, phase 07: a line for each adapter. A step looks at the first of each, never at those behind.

What a step costs grows with adapters, not with requests. Aborted requests are skipped when their turn comes.
"""

from collections import deque


class Line:
    """adapter -> (arrival, request), oldest first."""

    def __init__(self) -> None:
        self.lines: dict[int, deque[tuple[int, int]]] = {}
        self.waiting: dict[int, int] = {}  # request -> adapter
        self.arrivals = 0

    def arrive(self, request: int, adapter: int) -> None:
        self.arrivals += 1
        self.waiting[request] = adapter
        self.lines.setdefault(adapter, deque()).append((self.arrivals, request))

    def leave(self, request: int) -> None:
        self._drop(self.waiting[request], request)

    def admit(self, rows: int, held: frozenset[int], slots: int) -> list[int]:
        """Again and again the oldest of the first ones that fit."""
        joined, held = [], {0, *held}
        while len(joined) < rows:
            wanted = self.lines if slots else [adapter for adapter in held if adapter in self.lines]
            if not wanted:
                break
            first = min(wanted, key=lambda adapter: self.lines[adapter][0])
            if first not in held:
                slots -= 1
                held.add(first)
            request = self.lines[first][0][1]
            self._drop(first, request)
            joined.append(request)
        return joined

    def _drop(self, adapter: int, request: int) -> None:
        del self.waiting[request]
        line = self.lines[adapter]
        while line and line[0][1] not in self.waiting:
            line.popleft()
        if not line:
            del self.lines[adapter]
