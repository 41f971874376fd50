"""Bytes of adapters and slots, and what is known of one adapter. Nothing in vllm/lora/ (v0.22.1) tells them."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from torch import nn

from minivllm.layers.linear import LinearBase
from minivllm.lora.lora_model import storage_bytes
from minivllm.lora.stats import AdapterStats
from minivllm.lora.wrapped_modules import WrappedModules

if TYPE_CHECKING:
    from minivllm.lora.model_manager import LRUCacheLoRAModelManager


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


def memory_stats(manager: "LRUCacheLoRAModelManager") -> dict[str, object]:
    """Bytes. `minivllm.economics.slot_memory` predicts those of the device.

    slot_buffers            of all slots, allocated once, whatever is in them; no base weight is counted
    staging                 on a GPU, of the buffer in which an adapter arrives
    tables                  of what the backend and longer contexts look up
    device_total            of all that LoRA has allocated on the device: the sum of these three
    slot_bytes_by_adapter   of what each adapter fills of its slot
    cpu_total               of all adapters in memory; what two of them share is counted once
    cpu_bytes_by_adapter    of each; for a GPU they lie in pieces of page-locked memory, which have room for more
    """
    adapters = manager.list_adapters()
    writer = manager.slot_writer
    of_layers = [table for layer in manager.wrapped.others for table in layer.tables]
    tables = [*of_layers, *manager.punica_wrapper.tables, *([writer.places] if writer else [])]
    device = {
        "slot_buffers": slot_bytes(manager.wrapped),
        "staging": writer.arrived.nbytes if writer else 0,
        "tables": storage_bytes(tables),
    }
    return {
        **device,
        "device_total": sum(device.values()),
        "slot_bytes_by_adapter": {
            active: sum(tensor.nbytes for tensor in adapters[active].tensors)
            for active in manager.list_active_adapters()
        },
        "cpu_total": storage_bytes(tensor for lora in adapters.values() for tensor in lora.tensors),
        "cpu_bytes_by_adapter": {adapter_id: lora.nbytes for adapter_id, lora in adapters.items()},
    }


def lora_info(manager: "LRUCacheLoRAModelManager", adapter_id: int) -> dict[str, object]:
    """Name, rank, bytes, slot, pin and history of an adapter in memory; ValueError for another id."""
    lora = manager.get_adapter(adapter_id)
    if lora is None:
        raise ValueError(
            f"adapter {adapter_id} is not registered; registered are {sorted(manager.list_adapters())}"
        )
    return {
        "id": adapter_id,
        "name": lora.name,
        "rank": lora.rank,
        "bytes": lora.nbytes,
        "slot": manager.list_active_adapters().get(adapter_id),
        "pinned": adapter_id in manager.pinned_adapters,
        **asdict(manager.stats.by_adapter.get(adapter_id, AdapterStats())),
    }
