"""Open exercise, phase 11: which of several engines gets a request. `lab open 11` judges it.

Four engines stand behind one server. There are 40 adapters of ranks 8 to 64, and an engine's memory has room for 320
ranks of the 1,200. An engine serves one request at a time, in the order in which they come to it, for 40 ms each. If
it lacks the adapter by then, it reads that first, 2.6 ms for each rank, and forgets the least recently used ones for
it. Requests come every 16 ms on average. Popularity drifts, and has nothing to do with rank; at times one adapter is
hot.

Budget: at most 0.8 of the seconds that affine routing has beyond the least that is possible, from the moment at which
a request comes to its end. Affine routing is 1, and 0 has nothing to read and one queue for all engines. Traffic is
made afresh for each judgement.

The simulator asks a callable with the arguments of `choose`, where `unfinished` is `load`, and adapter 0 is base.
A file with `minivllm.policies.routing.POLICIES["mine"] = lambda seed: ...` adds one. It is tried by
`minivllm simulate --replicas 4 --policy-file FILE --routing affine,mine`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Engine(Protocol):
    """unfinished: requests that were sent to it and have not ended"""

    unfinished: int

    def has(self, adapter: int) -> bool:
        """Whether the adapter is in its memory, once all that was sent to it is done."""


class Policy:
    """Which engine gets a request. This one takes whoever has the fewest."""

    def __init__(self, ranks: Mapping[int, int]) -> None:
        """ranks: of each adapter"""
        self.ranks = ranks

    def choose(self, adapter: int, engines: Sequence[Engine]) -> int:
        """The number of the engine that gets the request which has just come."""
        return min(range(len(engines)), key=lambda number: engines[number].unfinished)
