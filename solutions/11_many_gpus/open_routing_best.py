"""What a read costs those who come later, too: whoever makes room for it, by how often it is asked for these days.

An engine shows how many requests it has, not how long they take, nor who leaves next. Both follow from what was sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MEMORY, MS_TO_SERVE, MS_TO_READ = 320, 40, 2.6
PRICE = 1.2  # of a millisecond of reading: it delays those behind it
FADES = 0.995  # what a request weighs when the next one comes
AHEAD = 150  # requests: who is asked for within these will be missed
ELSEWHERE = 0.1  # of what a loss costs, where another engine has the adapter


class Policy:
    """The engine with the least: work before the request, its read, and what those cost that leave for it."""

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self.ranks = ranks
        self.rate = dict.fromkeys(ranks, 0.0)  # share of the requests
        self.held: list[dict[int, None]] = []  # by engine, the least recently used first
        self.work: list[list[float]] = []  # by engine, ms of each unfinished request

    def choose(self, adapter: int, engines: Sequence[Any]) -> int:
        self.held = self.held or [{} for _ in engines]
        self.work = self.work or [[] for _ in engines]
        self.rate = {key: FADES * rate for key, rate in self.rate.items()}
        self.rate[adapter] += 1 - FADES
        for engine, work in zip(engines, self.work):
            del work[: len(work) - engine.unfinished]
        costs = [sum(work) + self.to_have(adapter, held) for work, held in zip(self.work, self.held)]
        number = costs.index(min(costs))
        self.send(adapter, self.held[number], self.work[number])
        return number

    def to_have(self, adapter: int, held: Mapping[int, None]) -> float:
        """Milliseconds for the adapter in a memory that may lack it."""
        if adapter in held:
            return 0.0
        return PRICE * self.to_read(adapter) + sum(map(self.to_lose, self.leaving(adapter, held)))

    def to_read(self, adapter: int) -> float:
        return MS_TO_READ * self.ranks[adapter]

    def to_lose(self, adapter: int) -> float:
        """Its read, as likely as it is asked for soon. Where another engine has it, that one is asked."""
        is_elsewhere = sum(adapter in held for held in self.held) > 1
        likely = min(1.0, AHEAD * self.rate[adapter])
        return self.to_read(adapter) * likely * (ELSEWHERE if is_elsewhere else 1)

    def leaving(self, adapter: int, held: Mapping[int, None]) -> list[int]:
        """Who makes room for an adapter that is not there."""
        room, gone = MEMORY - sum(map(self.ranks.get, held)) - self.ranks[adapter], []
        for key in held:
            if room >= 0:
                break
            gone.append(key)
            room += self.ranks[key]
        return gone

    def send(self, adapter: int, held: dict[int, None], work: list[float]) -> None:
        """The same that the engine will do."""
        is_held = adapter in held
        for key in [adapter] if is_held else self.leaving(adapter, held):
            del held[key]
        held[adapter] = None
        work.append(MS_TO_SERVE + (0 if is_held else self.to_read(adapter)))
