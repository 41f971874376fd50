"""What happens to adapters, for whoever listens, and the counters of it. Nothing in vllm/lora/ (v0.22.1) tells it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import time


@dataclass(frozen=True, slots=True)
class LoRAEvent:
    """Something that happened to an adapter.

    kind      one of those below
    slot      of "activate", "evict" and "pin"
    seconds   that a "load" or an "activate" took
    reason    of "refuse", in a sentence
    name      of "load": what its request calls the adapter

    Kinds:
    load      it was read from disk
    activate  it was copied into a slot
    hit       a step found it in a slot
    miss      a step had to have it copied into one
    evict     it left a slot, for another adapter
    drop      it left memory, for another adapter
    remove    it left memory, by order
    pin       it keeps its slot
    unpin     it may be evicted again
    refuse    it cannot be served
    forget    its id and names are free
    """

    kind: str
    adapter_id: int
    slot: int | None = None
    seconds: float = field(default=0.0, compare=False)
    reason: str = field(default="", compare=False)
    name: str = field(default="", compare=False)


Listener = Callable[[LoRAEvent], None]

# Kept for `drain_events`, the last ones: an engine that nobody records never asks for them.
MOST_EVENTS = 10_000


@dataclass(slots=True)
class AdapterStats:
    """One adapter's history. It outlives the adapter's stay in memory: an idle adapter is not forgotten.

    loads         times it was read from disk
    activations   times it was copied into a slot
    steps         steps that used it
    last_used     when the last of them began, in seconds since the epoch
    """

    loads: int = 0
    activations: int = 0
    steps: int = 0
    last_used: float | None = None


@dataclass
class LoRAStats:
    """Counters since the start, in one place; a listener of a manager's events. Nothing that decides reads it.

    hits, misses      a step found an adapter in a slot, or had to copy it there
    evictions         adapters that lost their slot to another one
    cpu_evictions     adapters that lost their place in memory, and with it their slot
    loads, load_seconds            adapter folders read, and checked
    activations, activate_seconds  copies into slots
    events            loads, activations, evictions and drops since the last `drain_events`, the last MOST_EVENTS
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    cpu_evictions: int = 0
    loads: int = 0
    load_seconds: float = 0.0
    activations: int = 0
    activate_seconds: float = 0.0
    by_adapter: dict[int, AdapterStats] = field(default_factory=dict)
    events: list[LoRAEvent] = field(default_factory=list)

    def adapter(self, adapter_id: int) -> AdapterStats:
        """The history of one adapter; begins one for an id not seen before."""
        return self.by_adapter.setdefault(adapter_id, AdapterStats())

    def __call__(self, event: LoRAEvent) -> None:
        """Count an event."""
        if event.kind in ("hit", "miss"):
            self.hits += event.kind == "hit"
            self.misses += event.kind == "miss"
            history = self.adapter(event.adapter_id)
            history.steps, history.last_used = history.steps + 1, time()
            return
        if event.kind == "forget":  # under its id there may soon be another adapter
            self.by_adapter.pop(event.adapter_id, None)
        if event.kind in ("load", "activate", "evict", "drop"):
            self.events.append(event)
            del self.events[:-MOST_EVENTS]
        self.evictions += event.kind == "evict"
        self.cpu_evictions += event.kind == "drop"
        if event.kind == "load":
            self.loads += 1
            self.load_seconds += event.seconds
            self.adapter(event.adapter_id).loads += 1
        elif event.kind == "activate":
            self.activations += 1
            self.activate_seconds += event.seconds
            self.adapter(event.adapter_id).activations += 1

    def drain_events(self) -> list[LoRAEvent]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    @property
    def hit_rate(self) -> float:
        """Hits among all uses; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def as_dict(self) -> dict[str, object]:
        """Counters and hit rate as plain values, without the events."""
        counters = {name: value for name, value in vars(self).items() if name not in ("events", "by_adapter")}
        by_adapter = {adapter_id: asdict(history) for adapter_id, history in self.by_adapter.items()}
        return {**counters, "by_adapter": by_adapter, "hit_rate": self.hit_rate}
