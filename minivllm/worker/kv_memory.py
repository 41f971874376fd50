"""How much memory keys and values get. Stands for `determine_available_memory` and `initialize_kv_cache` of
vllm/v1/worker/gpu_worker.py (v0.22.1).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minivllm.config import CPU_KV_CACHE_BYTES

if TYPE_CHECKING:
    from minivllm.worker.model_runner import ModelRunner


@dataclass(frozen=True)
class MemoryPlan:
    """num_blocks   KV blocks, block 0 included, which is never handed out"""

    num_blocks: int


class KVMemory:
    """Gives the KV cache memory of its own, a tensor for each attention layer."""

    def plan(self, runner: "ModelRunner") -> MemoryPlan:
        """The number of blocks in the configuration, or else as many as requests can use and memory holds."""
        if (num_blocks := runner.config.cache_config.num_blocks) is not None:
            return MemoryPlan(num_blocks)
        return MemoryPlan(
            max(2, min(self.useful_blocks(runner), self.available(runner) // runner.kv_block_bytes))
        )

    def useful_blocks(self, runner: "ModelRunner") -> int:
        """The blocks of `max_num_seqs` requests with the longest contexts."""
        return runner.config.scheduler_config.max_num_seqs * runner.max_blocks_per_request + 1

    def available(self, runner: "ModelRunner") -> int:
        """Bytes for keys and values: the smallest number of all ranks."""
        return runner.tp.least(self._own(runner))

    def _own(self, runner: "ModelRunner") -> int:
        """The bytes in the configuration, or else what this process has."""
        memory_bytes = runner.config.cache_config.memory_bytes
        return self.measure(runner) if memory_bytes is None else memory_bytes

    def measure(self, runner: "ModelRunner") -> int:
        """On a CPU a fixed number, because how much of the memory other processes will need is unknown."""
        return CPU_KV_CACHE_BYTES

    def allocate(self, runner: "ModelRunner", plan: MemoryPlan) -> None:
        """Give each attention layer its tensor, zeros."""
        for layer in runner.attention_layers:
            shape = layer.kv_cache_shape(plan.num_blocks, runner.config.cache_config.block_size)
            layer.bind_kv_cache(
                torch.zeros(shape, dtype=runner.config.model_config.dtype, device=runner.device)
            )
