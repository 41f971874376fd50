"""KV cache and adapters in one piece of memory a layer. vLLM 0.22.1 divides it once (vllm/v1/worker/gpu_worker.py)."""

from dataclasses import dataclass

import torch

from minivllm.gpu.pages.pool import PagePool
from minivllm.worker.kv_memory import KVMemory, MemoryPlan
from minivllm.worker.model_runner import ModelRunner

# Adapters of the largest rank that fit whatever the KV cache holds, where memory is short.
LEAST_ADAPTERS = 8


@dataclass(frozen=True)
class KVAndPagesPlan(MemoryPlan):
    """num_pages       pages of adapters beside the KV blocks
    blocks_a_page   w, KV blocks that are as large as a page
    """

    num_pages: int = 0
    blocks_a_page: int = 0


class KVAndPagesMemory(KVMemory):
    """Gives adapters that lie in pages a part of the KV cache's memory.

    Each layer's KV tensor is longer than its blocks: page i is the memory of blocks i * w to (i + 1) * w - 1, in all
    layers. Pages past the KV blocks are the adapters' own. The others are borrowed.

    memory   measures what there is for both together
    """

    def __init__(self, memory: KVMemory) -> None:
        self.memory = memory

    def measure(self, runner: ModelRunner) -> int:
        return self.memory.measure(runner)

    def plan(self, runner: ModelRunner) -> MemoryPlan:
        """KV blocks, and pages of adapters beside them.

        Where memory is measured or given in bytes, KV blocks get what they can use, and adapters what is left of it,
        but at least room for `LEAST_ADAPTERS`.
        """
        pool, cache = pool_of(runner), runner.config.cache_config
        if not pool.layers:
            return super().plan(runner)
        w = blocks_a_page(runner, pool)
        slots = runner.config.lora_config.max_loras
        most, least = (n * pool.pages_a_slot for n in (slots, min(slots, LEAST_ADAPTERS)))
        if cache.num_blocks is not None and not runner.on_gpu:
            return KVAndPagesPlan(cache.num_blocks, most, w)
        budget = self._shared_bytes(runner, pool, least) // runner.kv_block_bytes
        wanted = cache.num_blocks or self.useful_blocks(runner)
        num_pages = min(most, max(least, (budget - wanted) // w))
        if cache.num_blocks is not None:
            return KVAndPagesPlan(cache.num_blocks, num_pages, w)
        left = budget - num_pages * w
        if left < 2:
            raise ValueError(
                f"{budget} KV blocks of memory do not hold {num_pages} pages of adapters and a request; raise "
                "gpu_memory_utilization or kv_cache_memory_bytes, or lower max_lora_rank or max_loras"
            )
        return KVAndPagesPlan(min(wanted, left), num_pages, w)

    def _shared_bytes(self, runner: ModelRunner, pool: PagePool, pages: int) -> int:
        """For KV blocks and adapters together; where that is measured, with so many pages in use meanwhile."""
        if runner.config.cache_config.memory_bytes is not None or not runner.on_gpu:
            return self.available(runner)
        pool.bind_own(pages)
        shared = self.available(runner) + pool.nbytes
        pool.unbind()
        return shared

    def allocate(self, runner: ModelRunner, plan: MemoryPlan) -> None:
        """A tensor for each attention layer, and the pages in it; none while memory is measured."""
        num_pages = plan.num_pages if isinstance(plan, KVAndPagesPlan) else 0
        if not num_pages:
            return super().allocate(runner, plan)
        pool, w = pool_of(runner), plan.blocks_a_page
        extra = -plan.num_blocks % w + num_pages * w
        regions = []
        for layer in runner.attention_layers:
            shape = layer.kv_cache_shape(plan.num_blocks + extra, runner.config.cache_config.block_size)
            memory = torch.zeros(shape, dtype=runner.config.model_config.dtype, device=runner.device)
            layer.bind_kv_cache(memory[: plan.num_blocks])
            regions.append(memory.flatten().view(pool.layers[0].a[0].dtype))
        pool.bind(regions, w * block_bytes(runner) // regions[0].itemsize)
        return None


def pool_of(runner: ModelRunner) -> PagePool:
    """The pages of a runner whose adapters lie in them."""
    return runner.worker_manager.manager.pool


def block_bytes(runner: ModelRunner) -> int:
    """Of one KV block in one layer."""
    shape = runner.attention_layers[0].kv_cache_shape(1, runner.config.cache_config.block_size)
    return torch.Size(shape).numel() * runner.config.model_config.dtype.itemsize


def blocks_a_page(runner: ModelRunner, pool: PagePool) -> int:
    """KV blocks that are as large as a page of adapters, in each layer."""
    elements = pool.page_elements(len(runner.attention_layers))
    page_bytes = elements * pool.layers[0].a[0].dtype.itemsize
    return -(-page_bytes // block_bytes(runner))
