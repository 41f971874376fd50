"""Open exercise, phase 07: beside a line for each adapter, the first ones of all in a heap.

While slots are free the heap gives the oldest; without one, only adapters that hold a slot are asked, and those are
few. So a step costs what it admits, times a logarithm, and adapters without a slot cost nothing.
"""

from collections import deque
from heapq import heapify, heappop, heappush


class Line:
    """adapter -> (arrival, request, adapter), oldest first. `first` has the first of each, and some that are gone."""

    def __init__(self) -> None:
        self.lines: dict[int, deque[tuple[int, int, int]]] = {}
        self.waiting: dict[int, tuple[int, int, int]] = {}
        self.first: list[tuple[int, int, int]] = []
        self.arrivals = 0

    def arrive(self, request: int, adapter: int) -> None:
        self.arrivals += 1
        entry = self.waiting[request] = (self.arrivals, request, adapter)
        line = self.lines.get(adapter)
        if line is None:
            self.lines[adapter] = deque([entry])
            heappush(self.first, entry)
        else:
            line.append(entry)

    def leave(self, request: int) -> None:
        self._drop(self.waiting[request])

    def admit(self, rows: int, held: frozenset[int], slots: int) -> list[int]:
        """While a slot is free, from the heap of all; then from a heap of those that hold one."""
        joined, held, heap = [], {0, *held}, self.first
        is_narrow = False
        while len(joined) < rows:
            if not slots and not is_narrow:
                heap = [self.lines[adapter][0] for adapter in held if adapter in self.lines]
                heapify(heap)
                is_narrow = True
            while heap and not self._is_first(heap[0]):
                heappop(heap)
            if not heap:
                break
            entry = heap[0]
            if entry[2] not in held:
                slots -= 1
                held.add(entry[2])
            self._drop(entry)
            if is_narrow and entry[2] in self.lines:
                heappush(heap, self.lines[entry[2]][0])
            joined.append(entry[1])
        return joined

    def _is_first(self, entry: tuple[int, int, int]) -> bool:
        line = self.lines.get(entry[2])
        return line is not None and line[0] is entry

    def _drop(self, entry: tuple[int, int, int]) -> None:
        del self.waiting[entry[1]]
        line = self.lines[entry[2]]
        if line[0] is not entry:
            return
        while line and line[0][1] not in self.waiting:
            line.popleft()
        if line:
            heappush(self.first, line[0])
        else:
            del self.lines[entry[2]]
