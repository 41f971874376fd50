"""Open exercise, phase 07: a step's host time when many wait. `lab open 7` judges it.

1,500 requests of 300 adapters and of the base model wait, 4 slots and 12 rows serve them. While the host looks for who
may join, the GPU has nothing to do. So what a step costs must not grow with who waits.

Budget: at most 300 bytecode instructions of this file's functions for each request that comes, in all. What a function
written in C does inside is not counted: the count is the same on every machine, but it is not time.
"""


class Line:
    """Requests that wait, by arrival. This one walks all of them in every step."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []

    def arrive(self, request: int, adapter: int) -> None:
        """A request comes in last. Its number says nothing of its arrival.   adapter: 0 = base"""
        self.requests.append((request, adapter))

    def leave(self, request: int) -> None:
        """A waiting request is aborted."""
        self.requests = [(number, adapter) for number, adapter in self.requests if number != request]

    def admit(self, rows: int, held: frozenset[int], slots: int) -> list[int]:
        """Requests that join in this step, by arrival, and no longer wait: at most `rows`.

        held    adapters that have a slot     slots   how many slots are free

        Each in line joins if it is base's, or its adapter has a slot, or one is free, which it then has. Who finds
        none is passed over, and the next is asked.
        """
        joined, left, held = [], [], set(held)
        for request, adapter in self.requests:
            fits = adapter == 0 or adapter in held or slots > 0
            if not fits or len(joined) == rows:
                left.append((request, adapter))
                continue
            if adapter and adapter not in held:
                slots -= 1
                held.add(adapter)
            joined.append(request)
        self.requests = left
        return joined
