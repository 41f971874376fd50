"""What LoRA slots take, from config.json alone, before anything is allocated.

vLLM 0.22.1 finds out by allocating (`determine_available_memory`, vllm/v1/worker/gpu_worker.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from minivllm.config import EngineConfig, LoRAConfig
from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.slots import Slots
from minivllm.models.config import ModelArchitecture
from minivllm.models.registry import MODELS


def shapes_of(
    model: ModelArchitecture,
    lora_config: LoRAConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    tp: Ranks = ONE_RANK,
    make_slot_writer: Callable[..., Any] | None = None,
    *,
    extensions: LoRAExtensions,
) -> LRUCacheLoRAModelManager:
    """A model with the slots that an engine on that device makes: shapes without values, and no room for a step.

    tp                 of several processes that share the model, whose part it is: `TensorParallel(rank, size)`
    make_slot_writer   of `LRUCacheLoRAModelManager`
    extensions         what adapters may have, and which backends lay their slots out
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
    model: ModelArchitecture, lora_config: LoRAConfig | None = None, *, extensions: LoRAExtensions
) -> dict[str, list[tuple[int, int]]]:
    """Every layer that adapters may name -> K and N of each pair of A and B in a slot, each expert's by itself."""
    shapes = shapes_of(model, lora_config or LoRAConfig(), extensions=extensions)
    return {
        name: [
            (a.shape[-1], b.shape[-2])
            for a, b in zip(layer.slots.a, layer.slots.b)
            for _ in range(a.shape[1])
        ]
        for name, layer in shapes.modules.items()
    }


@dataclass(frozen=True)
class SlotMemory:
    """What LoRA takes on a device beside the base model, in bytes, whether adapters are there or not.

    Letters as everywhere: S slots of rank R, for a part with A (r, K) and B (N, r); n parts in a layer.

    a_and_b   S * R * (K + N) elements for every part of every layer that is wrapped, E times that for E experts. None
              for linears and experts that are "paged". Processes that share the model have their parts: of
              column-parallel linears a share of N, of row-parallel ones and of experts' w2 of K, of the ends of V.
              With `fully_sharded_loras` of R for the first's A, of N for the others' B
    beside    what adapters may have beside A and B. `bias_enabled`, `enable_dora`: each S * N for every part of a
              linear. `lora_extra_vocab_size` X: S * X * H for the embedding and for the head, whose V is V + X in
              `a_and_b`
    layout    more that a backend takes for its way to lay slots out. Fully sharded, an A of R' rows has R' * R'
              more for each slot
    staging   on a GPU: the buffer that an adapter arrives in, as long as the largest that fits into a slot, and 24
              bytes for each of its matrices
    pages     of linears and experts that are "paged", for S adapters of rank R, if the number is given: S * 8 * (K + N)
              elements for every eight ranks and part. They are of the KV cache's memory, which lends an adapter as
              many as its own rank needs, so no sum here has them. A page is rounded up to whole KV blocks there
    tables    on a GPU: where each matrix of a slot lies, 48 bytes each, and live ranks, 4 bytes a part and slot. In
              pages also which a slot has, 4 bytes for eight ranks.
              Everywhere, with `long_lora_scaling_factors`: cosines and sines of the model's own positions once more,
              and of those of each factor

    Not in it: what a GPU backend keeps for the rows of a step, some 12 bytes for each that there can be; and what
    PyTorch's allocator rounds up, which may be 1 MiB for each buffer of more than 1 MiB.
    """

    a_and_b: int
    beside: int
    layout: int
    staging: int
    tables: int
    pages: int

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
    *,
    extensions: LoRAExtensions,
) -> SlotMemory:
    """What slots of this configuration will take on a device, before any is allocated.

    device   it need not be there: "cuda" may be asked about anywhere
    dtype    of the model, and of slots whose `lora_dtype` is "auto"; None = float32 on a CPU, the checkpoint's on a GPU
    tp       which of several processes that share the model asks for its part
    """
    on_gpu = torch.device(device).type == "cuda"
    dtype = dtype or (model.dtype if on_gpu else torch.float32)
    make_slot_writer = extensions.make_slot_writer if on_gpu else None
    shapes = shapes_of(model, lora_config, device, dtype, tp, make_slot_writer, extensions=extensions)
    itemsize = lora_config.slot_dtype(dtype).itemsize
    pool = getattr(shapes.punica_wrapper, "pool", None)  # of `PagedBackend`
    pages = 0
    if pool is not None and lora_config.max_loras is not None:
        pages = lora_config.max_loras * pool.pages_a_slot * pool.page_elements(1) * itemsize
    in_slots = [layer.slots for layer in shapes.modules.values() if _has_a_and_b(layer.slots)]
    elements = sum(matrix.numel() for slots in in_slots for matrix in (*slots.a, *slots.b))
    a_and_b = elements * itemsize
    tables = (
        t for layer in shapes.modules.values() for of_option in layer.slots.beside.values() for t in of_option
    )
    beside = sum(table.nbytes for table in tables)
    taken = shapes.get_memory_stats()
    layout = taken["slot_buffers"] - a_and_b - beside
    return SlotMemory(a_and_b, beside, layout, taken["staging"], taken["tables"], pages)


def _has_a_and_b(slots: Slots) -> bool:
    """Whether a layer's slots have memory for more than what is beside A and B, which pages have."""
    return len(slots.memory) > sum(len(tables) for tables in slots.beside.values())


def refuse_slots_that_do_not_fit(
    config: EngineConfig, tp: Ranks = ONE_RANK, *, extensions: LoRAExtensions
) -> None:
    """ValueError when a device cannot hold what LoRA is about to allocate; the base model is there already.

    vLLM runs out of memory instead.
    """
    model, lora_config = config.model_config.architecture, config.lora_config
    dtype = config.model_config.dtype
    needed = slot_memory(model, lora_config, config.device, dtype, tp, extensions=extensions).total
    if needed <= (free := room_for_slots(config.device)):
        return
    names = sorted(
        {name.rpartition(".")[2] for name in adapted_layers(model, lora_config, extensions=extensions)}
    )
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
