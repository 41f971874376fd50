"""Bytes of adapters and slots. Nothing in vllm/lora/ (v0.22.1) tells them."""

from collections.abc import Iterable, Mapping
from typing import Any

from minivllm.lora.backend import Backend
from minivllm.lora.lora_model import LoRAModel, storage_bytes
from minivllm.lora.wrapping import WrappedModules


def slot_bytes(wrapped: WrappedModules) -> int:
    """Bytes of all slots."""
    return storage_bytes(tensor for layer in wrapped.modules.values() for tensor in layer.slots.memory)


def memory_stats(
    wrapped: WrappedModules,
    backend: Backend,
    slot_writer: Any | None,
    adapters: Mapping[int, LoRAModel],
    active: Iterable[int],
) -> dict[str, object]:
    """Bytes. `minivllm.economics.slot_memory` predicts those of the device.

    adapters   id -> weights in memory    active   ids of those that are in slots

    slot_buffers            of all slots, allocated once, whatever is in them
    staging                 on a GPU, of the buffer in which an adapter arrives
    tables                  of what the backend and longer contexts look up
    device_total            of all that LoRA has allocated on the device: the sum of these three
    slot_bytes_by_adapter   of what each adapter fills of its slot
    cpu_total               of all adapters in memory; what two of them share is counted once
    cpu_bytes_by_adapter    of each; for a GPU they lie in pieces of page-locked memory, which have room for more
    """
    of_layers = [table for option in wrapped.options for table in option.tables]
    tables = [*of_layers, *backend.tables, *([slot_writer.places] if slot_writer else [])]
    device = {
        "slot_buffers": slot_bytes(wrapped),
        "staging": slot_writer.arrived.nbytes if slot_writer else 0,
        "tables": storage_bytes(tables),
    }
    return {
        **device,
        "device_total": sum(device.values()),
        "slot_bytes_by_adapter": {i: sum(tensor.nbytes for tensor in adapters[i].tensors) for i in active},
        "cpu_total": storage_bytes(tensor for lora in adapters.values() for tensor in lora.tensors),
        "cpu_bytes_by_adapter": {adapter_id: lora.nbytes for adapter_id, lora in adapters.items()},
    }
