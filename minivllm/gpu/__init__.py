"""What only a GPU needs: kernels, attention over pages, CUDA graphs, slots in pages. See vllm/lora/punica_wrapper/.

Brings      Llama-8B shape in bfloat16 on an H100, adapters of rank 16, output tokens a second with 32 and 128
            requests: base 5,026 and 16,380; 8 adapters 91.1 and 90.5 % of that, 32 adapters 78.3 and 80.4 %
            (benchmarks/README.md, engine-decode-pages-alone-h100-2026-11-24.json; beside vLLM: README.md)
Implements  of `LoRAExtensions`: `backends` (each a `Backend`) and `make_slot_writer`. Of `ModelRunner`: `memory`
            (`KVMemory`), `build_attention`, `capture` (`Graphs`), `linear_product`, `prepare_model`. Subclasses of
            `LRUCacheLoRAModelManager` and of `Scheduler` for adapters that share the KV cache's memory. install.py
            says when each is taken
Options     `punica_backend`, `batch_invariant`, `enforce_eager`
Costs       some 5,500 lines. Kernels are compiled and graphs captured at the start.
            A copy of an adapter takes room in page-locked memory; an engine on a CPU imports this file alone
"""

import os
from typing import TYPE_CHECKING, Any

import torch

from minivllm.config import LoRAConfig
from minivllm.extension import Extension
from minivllm.lora.backend import Backend

if TYPE_CHECKING:
    from minivllm.parts import Parts


def refuse_without_gpu(name: str, device: torch.device | str) -> None:
    """ValueError on a CPU, except through Triton's interpreter."""
    # The variable is Triton's own, for its interpreter: slow, and enough for tests.
    if torch.device(device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"punica backend '{name}' needs a GPU; on a CPU take grouped, or set TRITON_INTERPRET=1"
        )


# Below, imports are late: Triton is not everywhere.


def _triton(max_tokens: int, max_samples: int, device: torch.device | str, config: LoRAConfig) -> Backend:
    refuse_without_gpu("triton", device)
    from minivllm.gpu.triton_backend import TritonBackend

    return TritonBackend(max_tokens, max_samples, device, config.max_loras)


def _paged(max_tokens: int, max_samples: int, device: torch.device | str, config: LoRAConfig) -> Backend:
    refuse_without_gpu("paged", device)
    from minivllm.gpu.pages.backend import PagedBackend

    return PagedBackend(max_tokens, max_samples, device, config.max_loras, config.max_lora_rank)


def _invariant(max_tokens: int, max_samples: int, device: torch.device | str, config: LoRAConfig) -> Backend:
    refuse_without_gpu("invariant", device)
    from minivllm.gpu.invariant_backend import invariant_backend

    return invariant_backend(max_tokens, max_samples, device, config.max_loras, config.max_lora_rank)


def make_slot_writer(wrapped: Any, device: torch.device | str) -> Any:
    """What writes the slots of these layers on a GPU."""
    from minivllm.gpu.pages.writer import PagedSlotWriter
    from minivllm.gpu.slot_writer import SlotWriter

    pool = getattr(wrapped.backend, "pool", None)
    return SlotWriter(wrapped, device) if pool is None else PagedSlotWriter(wrapped, device, pool)


def _add_to(parts: "Parts") -> None:
    from minivllm.gpu.install import add_to

    add_to(parts)


BACKENDS = {"triton": _triton, "paged": _paged, "invariant": _invariant}
GPU = Extension({"backends": BACKENDS, "make_slot_writer": make_slot_writer}, _add_to)
