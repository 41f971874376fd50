"""What can be asked of adapters: counters, bytes, histories, a log. Nothing in vllm/lora/ (v0.22.1) has them."""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from time import time

import torch
from torch import nn

from minivllm.layers.linear import LinearBase
from minivllm.lora.events import LoRAEvent
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.seams import listeners
from minivllm.lora.wrapped_modules import WrappedModules

# Kept for `drain_events`, the last ones: an engine that nobody records never asks for them.
MOST_EVENTS = 10_000

logger = logging.getLogger(__name__)


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
            self.adapter(event.adapter_id).steps += 1
            self.adapter(event.adapter_id).last_used = time()
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


# Kind of an event -> level, and what is said of the adapter.
SENTENCES = {
    "load": (logging.INFO, "was read in {seconds:.3f} s"),
    "reload": (logging.INFO, "was read again in {seconds:.3f} s"),
    "remove": (logging.INFO, "was unloaded"),
    "pin": (logging.INFO, "is pinned in slot {slot}"),
    "unpin": (logging.INFO, "is pinned no longer"),
    "refuse": (logging.INFO, "is refused: {reason}"),
    "activate": (logging.DEBUG, "came into slot {slot} in {seconds:.3f} s"),
    "evict": (logging.DEBUG, "lost slot {slot} to another adapter"),
    "drop": (logging.DEBUG, "left memory for another adapter"),
}


class EventLog:
    """Writes a manager's events into the log: INFO for what somebody asked for, DEBUG for what follows from it."""

    def __init__(self, manager: LRUCacheLoRAModelManager) -> None:
        self.manager = manager
        self.names: dict[int, str] = {}  # by id, of those that were read

    def __call__(self, event: LoRAEvent) -> None:
        kind, adapter_id = event.kind, event.adapter_id
        if kind == "load":
            self.names[adapter_id] = event.name
            kind = "load" if self.manager.get_adapter(adapter_id) is None else "reload"
        name = self.names.pop(adapter_id, "") if kind == "forget" else self.names.get(adapter_id, "")
        level, sentence = SENTENCES.get(kind, (logging.NOTSET, ""))
        if sentence and logger.isEnabledFor(level):
            said = sentence.format(slot=event.slot, seconds=event.seconds, reason=event.reason)
            logger.log(level, "adapter '%s' (id %d) %s", name or adapter_id, adapter_id, said)


# Methods of every manager: users ask it, nothing inside does.


def stats_of(self: LRUCacheLoRAModelManager) -> LoRAStats:
    """The counters that listen to a manager; empty ones if none do."""
    return next((heard for heard in self.listeners if isinstance(heard, LoRAStats)), LoRAStats())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors keep allocated: each piece of memory once, all of it, however many views of it there are."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})


def tensors_of(lora: LoRAModel) -> list[torch.Tensor]:
    """A, B and what comes beside them, of all modules of an adapter."""
    return [tensor for weights in lora.loras.values() for tensor in weights.tensors]


def adapter_bytes(lora: LoRAModel) -> int:
    """Bytes of memory that an adapter's tensors keep; an A that parts of a fused module share counts once."""
    return storage_bytes(tensors_of(lora))


def slot_bytes(wrapped: WrappedModules) -> int:
    """Bytes of all slots. Base weights that a backend keeps in one piece with them do not count."""
    slots = [tensor for layer in wrapped.modules.values() for tensor in layer.slots.memory]
    bases = [
        layer.base_layer for layer in wrapped.modules.values() if isinstance(layer.base_layer, LinearBase)
    ]
    held = {tensor.untyped_storage() for tensor in slots}
    # A quantized weight is of another class, and never in one piece with slots.
    weights = [
        weight for base in bases for weight in (base.weight, base.bias) if type(weight) is nn.Parameter
    ]
    return storage_bytes(slots) - sum(w.nbytes for w in weights if w.untyped_storage() in held)


def get_memory_stats(self: LRUCacheLoRAModelManager) -> dict[str, object]:
    """Bytes. `minivllm.economics.slot_memory` predicts those of the device.

    slot_buffers            of all slots, allocated once, whatever is in them; no base weight is counted
    staging                 on a GPU, of the buffer in which an adapter arrives
    tables                  of what the backend and longer contexts look up
    device_total            of all that LoRA has allocated on the device: the sum of these three
    slot_bytes_by_adapter   of what each adapter fills of its slot
    cpu_total               of all adapters in memory; what two of them share is counted once
    cpu_bytes_by_adapter    of each; for a GPU they lie in pieces of page-locked memory, which have room for more
    """
    adapters = self.list_adapters()
    writer = self.slot_writer
    of_layers = [table for layer in self.wrapped.others for table in layer.tables]
    tables = [*of_layers, *self.punica_wrapper.tables, *([writer.places] if writer else [])]
    device = {
        "slot_buffers": slot_bytes(self.wrapped),
        "staging": writer.arrived.nbytes if writer else 0,
        "tables": storage_bytes(tables),
    }
    return {
        **device,
        "device_total": sum(device.values()),
        "slot_bytes_by_adapter": {
            active: sum(tensor.nbytes for tensor in tensors_of(adapters[active]))
            for active in self.list_active_adapters()
        },
        "cpu_total": storage_bytes(tensor for lora in adapters.values() for tensor in tensors_of(lora)),
        "cpu_bytes_by_adapter": {adapter_id: adapter_bytes(lora) for adapter_id, lora in adapters.items()},
    }


def get_lora_info(self: LRUCacheLoRAModelManager, adapter_id: int) -> dict[str, object]:
    """Name, rank, bytes, slot, pin and history of an adapter in memory; ValueError for another id."""
    lora = self.get_adapter(adapter_id)
    if lora is None:
        raise ValueError(
            f"adapter {adapter_id} is not registered; registered are {sorted(self.list_adapters())}"
        )
    return {
        "id": adapter_id,
        "name": lora.name,
        "rank": lora.rank,
        "bytes": adapter_bytes(lora),
        "slot": self.list_active_adapters().get(adapter_id),
        "pinned": adapter_id in self.pinned_adapters,
        **asdict(stats_of(self).by_adapter.get(adapter_id, AdapterStats())),
    }


# From the first event on.
listeners += [lambda manager: LoRAStats(), EventLog]
LRUCacheLoRAModelManager.stats = property(stats_of)
LRUCacheLoRAModelManager.get_memory_stats = get_memory_stats
LRUCacheLoRAModelManager.get_lora_info = get_lora_info
LoRAModel.nbytes = property(adapter_bytes)
