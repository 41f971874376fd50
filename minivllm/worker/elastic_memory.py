"""KV cache and adapters in one piece of memory a layer. vLLM 0.22.1 divides it once (vllm/v1/worker/gpu_worker.py)."""

from typing import Any

import torch
from torch import nn

from minivllm.config import PAGED_BACKENDS, EngineConfig
from minivllm.core.scheduler import Scheduler
from minivllm.elastic.scheduler import ElasticScheduler
from minivllm.layers.attention import Attention
from minivllm.lora.gpu.elastic_manager import ElasticWorkerLoRAManager
from minivllm.lora.gpu.page_pool import PagePool
from minivllm.policies.step_size import install_step_size
from minivllm.worker.mixed_graphs import MixedGraphs

# Adapters of the largest rank that fit whatever the KV cache holds, where memory is short.
LEAST_ADAPTERS = 8


class ElasticMemory:
    """The part of a `ModelRunner` that gives adapters pages of the KV cache's memory, if they lie in pages.

    Each layer's KV tensor is longer than its blocks: page i is the memory of blocks i * w to (i + 1) * w - 1, in all
    layers, w being `blocks_a_page`. Pages past the KV blocks are the adapters' own. The others are borrowed.
    """

    config: EngineConfig
    device: str
    on_gpu: bool
    model: nn.Module
    mixed_graphs: MixedGraphs | None
    blocks_a_page = 0

    @property
    def _pool(self) -> PagePool | None:
        manager = getattr(self, "lora_manager", None)
        return getattr(manager.manager.punica_wrapper, "pool", None) if manager is not None else None

    def load_lora_model(self, model: nn.Module, vllm_config: EngineConfig, device: str) -> nn.Module:
        if vllm_config.lora_config.backend_on(device) not in PAGED_BACKENDS:
            return super().load_lora_model(model, vllm_config, device)
        self.lora_manager = ElasticWorkerLoRAManager(vllm_config, device)
        return self.lora_manager.create_lora_manager(model)

    def make_scheduler(self, *args: Any, **options: Any) -> Scheduler:
        """The scheduler that goes with this memory, and with the steps that were captured.

        Parameters are the Scheduler's.
        """
        if self._pool is None or not self._pool.layers:
            scheduler = Scheduler(*args, **options)
        else:
            pages = {"manager": self.lora_manager.manager, "blocks_a_page": self.blocks_a_page}
            scheduler = ElasticScheduler(*args, **pages, **options)
        if self.mixed_graphs is not None:
            install_step_size(scheduler, self.mixed_graphs.sizes[-1])
        return scheduler

    def _attention(self) -> list[Attention]:
        return [module for module in self.model.modules() if isinstance(module, Attention)]

    def _block_bytes(self) -> int:
        """Of one KV block in one layer."""
        shape = self._attention()[0].kv_cache_shape(1, self.config.cache_config.block_size)
        return torch.Size(shape).numel() * self.config.model_config.dtype.itemsize

    def _num_kv_blocks(self) -> int:
        """KV blocks; those that adapters may have beside them come on top (`_num_pages`).

        Where memory is measured or given in bytes, KV blocks get what they can use, and adapters what is left of it,
        but at least room for `LEAST_ADAPTERS`.
        """
        pool, cache = self._pool, self.config.cache_config
        if pool is None or not pool.layers:
            return super()._num_kv_blocks()
        elements = pool.page_elements(len(self._attention()))
        page_bytes = elements * pool.layers[0].a[0].dtype.itemsize
        self.blocks_a_page = -(-page_bytes // self._block_bytes())
        slots = self.config.lora_config.max_loras
        most, least = (n * pool.pages_a_slot for n in (slots, min(slots, LEAST_ADAPTERS)))
        if cache.num_blocks is not None and not self.on_gpu:
            self._num_pages = most
            return cache.num_blocks
        budget = self._shared_bytes(pool, least) // self.kv_block_bytes
        useful = self.config.scheduler_config.max_num_seqs * self.max_blocks_per_request + 1
        wanted = cache.num_blocks or useful
        self._num_pages = min(most, max(least, (budget - wanted) // self.blocks_a_page))
        if cache.num_blocks is not None:
            return cache.num_blocks
        left = budget - self._num_pages * self.blocks_a_page
        if left < 2:
            raise ValueError(
                f"{budget} KV blocks of memory do not hold {self._num_pages} pages of adapters and a request; raise "
                "gpu_memory_utilization or kv_cache_memory_bytes, or lower max_lora_rank or max_loras"
            )
        return min(useful, left)

    def _shared_bytes(self, pool: PagePool, pages: int) -> int:
        """For KV blocks and adapters together; where that is measured, with so many pages in use meanwhile."""
        if self.config.cache_config.memory_bytes is not None or not self.on_gpu:
            return self._kv_memory()
        pool.bind_own(pages)
        shared = self._kv_memory() + pool.nbytes
        pool.unbind()
        return shared

    _num_pages = 0  # beside the KV blocks

    def _allocate_kv_cache(self, num_blocks: int) -> None:
        pool, dtype = self._pool, self.config.model_config.dtype
        extra = 0
        if self._num_pages:
            extra = -num_blocks % self.blocks_a_page + self._num_pages * self.blocks_a_page
        regions = []
        for module in self._attention():
            shape = module.kv_cache_shape(num_blocks + extra, self.config.cache_config.block_size)
            memory = torch.zeros(shape, dtype=dtype, device=self.device)
            module.bind_kv_cache(memory[:num_blocks])
            regions.append(memory.flatten())
        if extra:
            regions = [region.view(pool.layers[0].a[0].dtype) for region in regions]
            stride = self.blocks_a_page * self._block_bytes() // regions[0].itemsize
            pool.bind(regions, stride)
