"""What can be asked of an adapter manager: counters, bytes, an adapter's history. vLLM 0.22.1 has none of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from time import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from minivllm.lora.model_manager import LoRAModelManager


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
class LoRAEvent:
    """Something that happened to an adapter.

    kind   "load" (read from disk), "activate" (into a slot), "evict" (out of a slot, for another one),
           "drop" (out of memory, for another one)
    slot   of "activate" and "evict"
    """

    kind: str
    adapter_id: int
    slot: int | None = None


@dataclass
class LoRAStats:
    """Counters since the start, in one place. What somebody removes by name is not an eviction.

    hits, misses      a step found an adapter in a slot, or had to copy it there
    evictions         adapters that lost their slot to another one
    cpu_evictions     adapters that lost their place in memory, and with it their slot
    loads, load_seconds            adapter folders read, and checked
    activations, activate_seconds  copies into slots
    events            what happened since the last `drain_events`
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

    def count_use(self, adapter_id: int, hit: bool) -> None:
        """A step uses the adapter."""
        self.hits += hit
        self.misses += not hit
        self.adapter(adapter_id).steps += 1
        self.adapter(adapter_id).last_used = time()

    def count_load(self, adapter_id: int, seconds: float) -> None:
        self.loads += 1
        self.load_seconds += seconds
        self.adapter(adapter_id).loads += 1
        self.events.append(LoRAEvent("load", adapter_id))

    def count_activation(self, adapter_id: int, slot: int, seconds: float) -> None:
        self.activations += 1
        self.activate_seconds += seconds
        self.adapter(adapter_id).activations += 1
        self.events.append(LoRAEvent("activate", adapter_id, slot))

    def count_eviction(self, adapter_id: int, slot: int) -> None:
        self.evictions += 1
        self.events.append(LoRAEvent("evict", adapter_id, slot))

    def count_drop(self, adapter_id: int) -> None:
        self.cpu_evictions += 1
        self.events.append(LoRAEvent("drop", adapter_id))

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
        counters = asdict(replace(self, events=[]))
        del counters["events"]
        return {**counters, "hit_rate": self.hit_rate}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors keep allocated: each piece of memory once, all of it, however many views of it there are."""
    views = {tensor.untyped_storage(): tensor for tensor in tensors}
    return sum(_given_out(storage.nbytes(), view.is_pinned()) for storage, view in views.items())


def _given_out(nbytes: int, is_pinned: bool) -> int:
    # PyTorch gives page-locked memory out in powers of two.
    return 1 << (nbytes - 1).bit_length() if is_pinned and nbytes else nbytes


class AdapterReports:
    """Questions to a `LoRAModelManager`, which inherits them. They read and change nothing."""

    def get_free_slots(self: LoRAModelManager) -> list[int]:
        """Slots that hold nothing."""
        return [slot for slot, adapter_id in enumerate(self.lora_index_to_id) if adapter_id is None]

    def get_memory_stats(self: LoRAModelManager) -> dict[str, object]:
        """Bytes. `minivllm.economics.slot_memory` predicts those of the device.

        slot_buffers            of all slots, allocated once, whatever is in them; no base weight is counted
        staging                 on a GPU, of the buffer in which an adapter arrives
        tables                  of what the backend and longer contexts look up
        device_total            of all that LoRA has allocated on the device: the sum of these three
        slot_bytes_by_adapter   of what each adapter fills of its slot
        cpu_total               of all adapters in memory; what two of them share is counted once
        cpu_bytes_by_adapter    of each; for a GPU they are page-locked, and take up to twice their weights
        """
        adapters = self.list_adapters()
        writer = self.slot_writer
        tables = [*self.wrapped.tables, *self.punica_wrapper.tables, *([writer.places] if writer else [])]
        device = {
            "slot_buffers": self.wrapped.buffer_bytes,
            "staging": writer.arrived.nbytes if writer else 0,
            "tables": storage_bytes(tables),
        }
        return {
            **device,
            "device_total": sum(device.values()),
            "slot_bytes_by_adapter": {
                active: sum(tensor.nbytes for tensor in adapters[active].tensors)
                for active in self.list_active_adapters()
            },
            "cpu_total": storage_bytes(tensor for lora in adapters.values() for tensor in lora.tensors),
            "cpu_bytes_by_adapter": {adapter_id: lora.nbytes for adapter_id, lora in adapters.items()},
        }

    def get_lora_info(self: LoRAModelManager, adapter_id: int) -> dict[str, object]:
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
            "bytes": lora.nbytes,
            "slot": self.list_active_adapters().get(adapter_id),
            "pinned": adapter_id in self.pinned_adapters,
            **asdict(self.stats.by_adapter.get(adapter_id, AdapterStats())),
        }
