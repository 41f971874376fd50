"""What the adapter manager counted: hits, loads, evictions and the time they took."""

from dataclasses import asdict, dataclass, field


@dataclass
class AdapterStats:
    """One adapter's history; kept while it is out of memory, gone when it is removed by name."""

    loads: int = 0
    activations: int = 0
    steps: int = 0
    last_used: float | None = None  # seconds since the epoch


@dataclass
class LoRAEvent:
    """Something that happened to an adapter: "load", "activate", "evict" (slot), "drop" (memory)."""

    kind: str
    adapter_id: int
    slot: int | None = None


@dataclass
class LoRAStats:
    """Counters since the start. A hit: a step found its adapter in a slot; a miss: it had to be copied there."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    loads: int = 0
    cpu_evictions: int = 0
    activations: int = 0
    load_seconds: float = 0.0
    activate_seconds: float = 0.0
    by_adapter: dict[int, AdapterStats] = field(default_factory=dict)
    events: list[LoRAEvent] = field(default_factory=list)

    def adapter(self, adapter_id: int) -> AdapterStats:
        return self.by_adapter.setdefault(adapter_id, AdapterStats())

    def record(self, kind: str, adapter_id: int, slot: int | None = None) -> None:
        self.events.append(LoRAEvent(kind, adapter_id, slot))

    def drain_events(self) -> list[LoRAEvent]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)

    def as_dict(self) -> dict[str, object]:
        """Counters and hit rate, without the events."""
        counters = {name: value for name, value in asdict(self).items() if name != "events"}
        return {**counters, "hit_rate": self.hit_rate}
