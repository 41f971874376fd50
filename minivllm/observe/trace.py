"""What every step did, one JSON record each. Stands for nothing in vLLM, which only logs totals (v0.22.1)."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("prefill", "chunk", "decode")
# A record with its fields and the headers of its lists.
RECORD_BYTES = 800


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request's part of a step.

    adapter: its name; None for the base model, which sits in no slot
    tokens: how many of its tokens were computed
    kind: "prefill" (its whole prompt, or all that is missing of it), "chunk" (a part of that), "decode"
    cached: prompt tokens that the prefix cache gave it, recorded in the step that admits it
    """

    request: str
    adapter: str | None
    slot: int | None
    tokens: int
    kind: str
    cached: int = 0


@dataclass(frozen=True, slots=True)
class SlotEvent:
    """An adapter went into a slot, or out of it."""

    adapter: str
    slot: int


@dataclass(frozen=True, slots=True)
class TraceSkip:
    """A waiting request that this step passed over, and why."""

    request: str
    adapter: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine. Adapters go by their names.

    time_s: when it began, in seconds since the engine started
    rows: what was computed, in batch order
    slots: per slot the adapter in it while the step ran, or None
    pinned: adapters that may not be evicted
    loads: adapters read from disk for this step
    activations, evictions: adapters copied into a slot, or out of one to make room
    drops: adapters that left memory for others
    skipped: requests passed over, the first of them; more_skipped: how many more there were
    preempted: requests that lost their KV blocks and wait again
    waiting: requests in the queue after scheduling, the first of them; more_waiting: how many more there were
    running: how many have a place in the batch
    in_memory: how many adapters are in memory, those in slots included
    kv_blocks: how many blocks of the KV cache requests hold
    """

    step: int
    time_s: float
    rows: list[TraceRow] = field(default_factory=list)
    slots: list[str | None] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    activations: list[SlotEvent] = field(default_factory=list)
    evictions: list[SlotEvent] = field(default_factory=list)
    skipped: list[TraceSkip] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    running: int = 0
    more_skipped: int = 0
    more_waiting: int = 0
    drops: list[str] = field(default_factory=list)
    in_memory: int = 0
    kv_blocks: int = 0

    @property
    def num_skipped(self) -> int:
        return len(self.skipped) + self.more_skipped

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.more_waiting

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> StepRecord:
        """The inverse of `dataclasses.asdict`. TypeError for fields it does not have or lacks."""
        parts = {
            "rows": TraceRow,
            "activations": SlotEvent,
            "evictions": SlotEvent,
            "skipped": TraceSkip,
        }
        made = {name: [part(**each) for each in record.get(name, [])] for name, part in parts.items()}
        return cls(**{**record, **made})


class Trace:
    """The steps of an engine, oldest first.

    capacity: keep the last so many steps; None keeps all
    max_bytes: keep the last that take so much memory, as far as it can be estimated; the last one whatever it takes
    num_bytes: what those kept take
    """

    def __init__(
        self,
        records: Iterable[StepRecord] = (),
        capacity: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.records: list[StepRecord] = []
        self.num_bytes = 0
        self._bytes: deque[int] = deque()
        self._last_parts: set[int] = set()
        for record in records:
            self.append(record)

    def __len__(self) -> int:
        return len(self.records)

    def append(self, record: StepRecord) -> None:
        parts = _parts(record)
        # What it shares with the record before is counted there: most rows are the same at every step.
        by_id = dict(zip(map(id, parts), parts))
        new = sum(_part_bytes(by_id[part]) for part in by_id.keys() - self._last_parts)
        self._last_parts = set(by_id)
        self._bytes.append(RECORD_BYTES + 8 * (len(parts) + len(record.slots) + len(record.pinned)) + new)
        self.num_bytes += self._bytes[-1]
        self.records.append(record)
        while self._holds_too_much() and len(self.records) > 1:
            self.num_bytes -= self._bytes.popleft()
            del self.records[0]

    def _holds_too_much(self) -> bool:
        if self.capacity is not None and len(self.records) > self.capacity:
            return True
        return self.max_bytes is not None and self.num_bytes > self.max_bytes

    @property
    def adapters(self) -> list[str]:
        """Every adapter that had a row or a slot, sorted by name."""
        names = {row.adapter for record in self.records for row in record.rows}
        names |= {adapter for record in self.records for adapter in record.slots}
        return sorted(names - {None})

    def summary(self) -> dict[str, int]:
        """How often each thing happened, for a table and for tests that ask whether it did.

        Requests are those that were computed. What the trace leaves out is counted, too: `steps_left_out` came before
        the first that is kept, and `names_left_out` are those of waiting and skipped requests.
        """
        rows = [row for record in self.records for row in record.rows]
        counts = {kind: sum(row.kind == kind for row in rows) for kind in KINDS}
        return {
            "steps": len(self.records),
            "requests": len({row.request for row in rows}),
            "adapters": len(self.adapters),
            "tokens": sum(row.tokens for row in rows),
            "prefills": counts["prefill"],
            "chunks": counts["chunk"],
            "decodes": counts["decode"],
            "prefix_hits": sum(row.cached > 0 for row in rows),
            "mixed_steps": sum(len({row.adapter for row in record.rows}) > 1 for record in self.records),
            "loads": sum(len(record.loads) for record in self.records),
            "activations": sum(len(record.activations) for record in self.records),
            "evictions": sum(len(record.evictions) for record in self.records),
            "skips": sum(record.num_skipped for record in self.records),
            "preemptions": sum(len(record.preempted) for record in self.records),
            "steps_left_out": self.records[0].step if self.records else 0,
            "names_left_out": sum(record.more_skipped + record.more_waiting for record in self.records),
        }

    def write_jsonl(self, path: str | Path) -> None:
        """One line a step."""
        with open(path, "w", encoding="utf-8") as file:
            for record in self.records:
                file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")

    @classmethod
    def read_jsonl(cls, path: str | Path) -> Trace:
        """What `write_jsonl` wrote. ValueError naming the line that is no step record."""
        trace = cls()
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    trace.append(StepRecord.from_dict(json.loads(line)))
                except (ValueError, TypeError, AttributeError) as error:
                    raise ValueError(f"line {number} of '{path}' is no step record: {error}") from error
        return trace


def _parts(record: StepRecord) -> list[object]:
    events = [*record.activations, *record.evictions]
    return [
        *record.rows,
        *record.skipped,
        *record.waiting,
        *record.preempted,
        *record.loads,
        *record.drops,
        *events,
    ]


def _part_bytes(part: object) -> int:
    """A name, or a row, skip or event with the name of its request."""
    name = getattr(part, "request", "")
    return sys.getsizeof(part) + sys.getsizeof(name) + 16  # of the garbage collector
