"""What adapters cost in memory, from config.json alone, before anything is loaded.

vLLM 0.22.1 finds out by allocating (`determine_available_memory`, vllm/v1/worker/gpu_worker.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from minivllm.config import EngineConfig, LoRAConfig
from minivllm.gpu import BACKENDS
from minivllm.gpu.slot_writer import SlotWriter
from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.wrapped_modules import WrappedModules
from minivllm.models.config import ModelArchitecture
from minivllm.models.registry import MODELS
from minivllm.options import OPTIONS, SHARDED_WRAPPERS

GIB = 2**30

# What takes memory: options have tables of their own, and backends lay slots out.
EXTENSIONS = LoRAExtensions(OPTIONS, SHARDED_WRAPPERS, backends=BACKENDS)


def shapes_of(
    model: ModelArchitecture,
    lora_config: LoRAConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    tp: Ranks = ONE_RANK,
    make_slot_writer: Callable[[WrappedModules, str], SlotWriter] | None = None,
    extensions: LoRAExtensions = EXTENSIONS,
) -> LRUCacheLoRAModelManager:
    """A model with the slots that an engine on that device makes: shapes without values, and no room for a step.

    tp                 of several processes that share the model, whose part it is: `TensorParallel(rank, size)`
    make_slot_writer   of `LRUCacheLoRAModelManager`
    """
    lora_config = lora_config.on_device(device)
    config = replace(lora_config, punica_backend=lora_config.backend_on(device))
    base = MODELS[model.architecture](model, dtype, "meta", tp)
    return LRUCacheLoRAModelManager(
        base,
        0,
        0,
        model.vocab_size,
        config,
        "meta",
        make_slot_writer=make_slot_writer,
        extensions=extensions,
    )


def adapted_layers(
    model: ModelArchitecture, lora_config: LoRAConfig | None = None
) -> dict[str, list[tuple[int, int]]]:
    """Every layer that adapters may name -> K and N of each pair of A and B in a slot, each expert's by itself."""
    return _pairs(shapes_of(model, lora_config or LoRAConfig()))


def _pairs(shapes: LRUCacheLoRAModelManager) -> dict[str, list[tuple[int, int]]]:
    return {
        name: [
            (a.shape[-1], b.shape[-2])
            for a, b in zip(layer.slots.a, layer.slots.b)
            for _ in range(a.shape[1])
        ]
        for name, layer in shapes.modules.items()
    }


def adapter_bytes(model: ModelArchitecture, rank: int, itemsize: int = 2) -> int:
    """Bytes of an adapter on every linear, experts and their routers included; on neither embedding nor head.

    itemsize   bytes of an element
    """
    ends = MODELS[model.architecture].embedding_modules
    adapted = {n: pairs for n, pairs in adapted_layers(model).items() if n.rpartition(".")[2] not in ends}
    return sum(rank * (k + n) for pairs in adapted.values() for k, n in pairs) * itemsize


def weight_bytes(model: ModelArchitecture, itemsize: int = 2, tp: Ranks = ONE_RANK) -> int:
    """Bytes of the base model's weights: linears and experts, their biases, norms, embedding and output."""
    base = MODELS[model.architecture](model, torch.float32, "meta", tp)
    return sum(parameter.numel() for parameter in base.parameters()) * itemsize


def kv_bytes_per_token(model: ModelArchitecture, itemsize: int = 2, tp: Ranks = ONE_RANK) -> int:
    """Bytes of a token's keys and values in all layers."""
    heads = tp.kv_heads(model.num_key_value_heads)
    return 2 * model.num_hidden_layers * (heads.stop - heads.start) * model.head_dim * itemsize


@dataclass(frozen=True)
class SlotMemory:
    """What LoRA takes on a device beside the base model, in bytes, whether adapters are there or not.

    Letters as everywhere: S slots of rank R, for a part with A (r, K) and B (N, r); n parts in a layer.

    a_and_b   S * R * (K + N) elements for every part of every layer that is wrapped, E times that for E experts. None
              for what is "paged", linears and experts: pages are of the KV cache's memory. Processes that share the
              model have their parts: of column-parallel linears a share of N, of row-parallel ones and of experts' w2
              of K, of the ends of V. With `fully_sharded_loras` of R for the first's A, of N for the others' B
    beside    what adapters may have beside A and B. `bias_enabled`: S * N for every part of a linear.
              `lora_extra_vocab_size` X: S * X * H for the embedding and for the head, whose V is V + X in `a_and_b`
    layout    more that a backend takes for its way to lay slots out. "grouped" has B of a fused linear n times as
              wide: S * R * (n - 1) * (sum of N). "folded" rounds the rows of base weight and A up to a multiple of
              eight, and a base bias is as long as these. Fully sharded, an A of R' rows has R' * R' more for each slot
    staging   on a GPU: the buffer that an adapter arrives in, as long as the largest that fits into a slot, and 24
              bytes for each of its matrices
    tables    on a GPU: where each matrix of a slot lies, 48 bytes each, and live ranks, 4 bytes a part and slot.
              Everywhere, with `long_lora_scaling_factors`: cosines and sines of the model's own positions once more,
              and of those of each factor

    Not in it: what a GPU backend keeps for the rows of a step, some 12 bytes for each that there can be; and what
    PyTorch's allocator rounds up, which may be 1 MiB for each buffer, or "folded" weight, of more than 1 MiB.
    """

    a_and_b: int
    beside: int
    layout: int
    staging: int
    tables: int

    @property
    def slots(self) -> int:
        """The slot buffers: what grows with `max_loras`."""
        return self.a_and_b + self.beside + self.layout

    @property
    def total(self) -> int:
        return self.slots + self.staging + self.tables


def slot_memory(
    model: ModelArchitecture,
    lora_config: LoRAConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    tp: Ranks = ONE_RANK,
    extensions: LoRAExtensions = EXTENSIONS,
) -> SlotMemory:
    """What slots of this configuration will take on a device, before any is allocated.

    device   it need not be there: "cuda" may be asked about anywhere
    dtype    of the model, and of slots whose `lora_dtype` is "auto"; None = float32 on a CPU, the checkpoint's on a GPU
    tp       which of several processes that share the model asks for its part
    """
    on_gpu = torch.device(device).type == "cuda"
    dtype = dtype or (model.dtype if on_gpu else torch.float32)
    shapes = shapes_of(model, lora_config, device, dtype, tp, SlotWriter if on_gpu else None, extensions)
    lora_config = lora_config.on_device(device)
    in_slots = [layer.slots for layer in shapes.modules.values() if layer.slots.memory]
    elements = sum(matrix.numel() for slots in in_slots for matrix in (*slots.a, *slots.b))
    a_and_b = elements * lora_config.slot_dtype(dtype).itemsize
    tables = (
        t for layer in shapes.modules.values() for of_option in layer.slots.beside.values() for t in of_option
    )
    beside = sum(table.nbytes for table in tables)
    taken = shapes.get_memory_stats()
    layout = taken["slot_buffers"] - a_and_b - beside
    return SlotMemory(a_and_b, beside, layout, taken["staging"], taken["tables"])


def refuse_slots_that_do_not_fit(
    config: EngineConfig, tp: Ranks = ONE_RANK, extensions: LoRAExtensions = EXTENSIONS
) -> None:
    """ValueError when a device cannot hold what LoRA is about to allocate; the base model is there already.

    vLLM runs out of memory instead.
    """
    model, lora_config = config.model_config.architecture, config.lora_config
    needed = slot_memory(model, lora_config, config.device, config.model_config.dtype, tp, extensions).total
    if needed <= (free := room_for_slots(config.device)):
        return
    names = sorted({name.rpartition(".")[2] for name in adapted_layers(model, lora_config)})
    options = ("max_loras", "max_lora_rank", "lora_extra_vocab_size", "long_lora_scaling_factors")
    given = [f"{name} ({value})" for name in options if (value := getattr(lora_config, name))]
    raise ValueError(
        f"LoRA slots need {needed:,} bytes, but {config.device} has {free:,} for them: lower "
        f"{', '.join(given[:-1])} or {given[-1]}, or name fewer target_modules than {', '.join(names)}"
    )


def room_for_slots(device: torch.device | str) -> int:
    """Bytes: on a GPU what is free now. On a CPU all memory that the machine has.

    What of it can be had is not asked: the system may swap, count files it could forget, or stop a container
    short of it. It is enough to refuse what can never be held.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Plan:
    """How one device's memory is spent. Bytes, but for the last two.

    slots       `SlotMemory.total`, taken whether slots are used or not
    kv_cache    what is left of the share that the engine may use
    kv_tokens   tokens whose keys and values it holds
    requests    of `context` tokens each that may run at once
    """

    weights: int
    slots: int
    kv_cache: int
    kv_tokens: int
    requests: int


def plan(
    model: ModelArchitecture,
    memory: int,
    lora_config: LoRAConfig | None,
    context: int,
    *,
    utilization: float = 0.9,
    activations: int = 2 * GIB,
    device: str | torch.device = "cuda",
    dtype: torch.dtype | None = None,
    tp: Ranks = ONE_RANK,
) -> Plan:
    """Spend a device's memory: weights, activations and slots first, the rest on keys and values.

    memory          bytes of the device; `utilization` of it may be used
    lora_config     None = the base model alone
    activations     bytes that the largest step needs, CUDA graphs included: measure it for your model
    device, dtype, tp   as `slot_memory` has them; the device need not be there

    ValueError when nothing is left for a single request.
    """
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else model.dtype)
    weights = weight_bytes(model, dtype.itemsize, tp)
    slots = slot_memory(model, lora_config, device, dtype, tp).total if lora_config else 0
    kv_cache = int(memory * utilization) - activations - weights - slots
    tokens = kv_cache // kv_bytes_per_token(model, dtype.itemsize, tp)
    if tokens < context:
        raise ValueError(
            f"weights ({weights / GIB:.1f} GiB), LoRA slots ({slots / GIB:.1f} GiB) and activations "
            f"({activations / GIB:.1f} GiB) leave {max(kv_cache, 0) / GIB:.1f} GiB, too little for the keys "
            f"and values of {context} tokens; lower max_loras, max_lora_rank or the context"
        )
    return Plan(weights, slots, kv_cache, tokens, tokens // context)


def cost_per_tenant(
    device_per_hour: float, tenants: int, device_tokens_per_second: float, tokens_per_tenant_hour: float
) -> float:
    """What one of many equal tenants pays an hour if all share as few devices as carry their traffic.

    device_per_hour          price of a device
    device_tokens_per_second  measured, with as many adapters in the batch as there will be
    """
    devices = -(-tenants * tokens_per_tenant_hour // (3600 * device_tokens_per_second))
    return max(devices, 1) * device_per_hour / tenants
