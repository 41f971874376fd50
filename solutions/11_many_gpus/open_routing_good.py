"""Requests before it and a read, in milliseconds: the engine with the least of both. A read counts twice.

It delays whoever comes behind it as well, and what makes room for it will have to be read again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MS_TO_SERVE, MS_TO_READ = 40, 2.6  # a request; each rank
PRICE = 2  # of a millisecond of reading


class Policy:
    """As `affine`, but how far a request goes out of its way depends on the rank of its adapter."""

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self.ranks = ranks

    def choose(self, adapter: int, engines: Sequence[Any]) -> int:
        to_read = PRICE * MS_TO_READ * self.ranks[adapter]
        costs = [
            MS_TO_SERVE * engine.unfinished + (0 if engine.has(adapter) else to_read) for engine in engines
        ]
        return costs.index(min(costs))
