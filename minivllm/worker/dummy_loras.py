"""Adapters of zeros, to warm up. Stands for a part of vllm/v1/worker/lora_model_runner_mixin.py (v0.22.1)."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from minivllm.config import LoRAConfig
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager

# More adapters take no other path through any kernel, and each takes memory.
MOST_DUMMIES = 8


class DummyLoRAs:
    """What a runner with a `lora_manager` does on adapters of zeros; nobody hears of it."""

    lora_manager: LRUCacheWorkerLoRAManager | None = None

    @contextmanager
    def maybe_setup_dummy_loras(
        self, lora_config: LoRAConfig | None, remove_lora: bool = True
    ) -> Iterator[None]:
        """Inside, adapters of zeros with ids 1, 2, ... are in memory: one for each slot, but at most `MOST_DUMMIES`."""
        if lora_config is None:
            yield
            return
        manager = self.lora_manager.manager
        listeners, manager.listeners = manager.listeners, []
        try:
            for request in _dummy_requests(lora_config):
                self.lora_manager.add_dummy_lora(request, rank=min(lora_config.max_lora_rank, 8))
            yield
            if remove_lora:
                manager.remove_all_adapters()
        finally:
            manager.listeners = listeners

    def select_dummy_loras(
        self,
        lora_config: LoRAConfig | None,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray,
        with_lora: bool = True,
    ) -> None:
        """Make the dummy adapters take turns on the rows of a pass; without `with_lora` all are base rows.

        num_scheduled_tokens, num_sampled_tokens   (P,) int
        """
        if lora_config is None:
            return
        ids = with_lora * (np.arange(len(num_scheduled_tokens)) % len(_dummy_requests(lora_config)) + 1)
        mapping = LoRAMapping(
            tuple(ids.repeat(num_scheduled_tokens).tolist()), tuple(ids.repeat(num_sampled_tokens).tolist())
        )
        self.lora_manager.set_active_adapters(_dummy_requests(lora_config), mapping)

    @contextmanager
    def maybe_dummy_run_with_lora(
        self,
        lora_config: LoRAConfig | None,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray,
        remove_lora: bool = True,
    ) -> Iterator[None]:
        """Inside, a forward pass runs as a batch over all slots would, on adapters of zeros; for warm-up.

        num_scheduled_tokens, num_sampled_tokens   (P,) int, the rows of the pass; adapters take turns
        """
        with self.maybe_setup_dummy_loras(lora_config, remove_lora):
            self.select_dummy_loras(lora_config, num_scheduled_tokens, num_sampled_tokens)
            yield

    @contextmanager
    def without_ends(self) -> Iterator[None]:
        """Inside, layers are told that no adapter has weights on embedding and head."""
        backend = self.lora_manager.manager.punica_wrapper
        backend.leaves_out_ends = True
        try:
            yield
        finally:
            backend.leaves_out_ends = False


def _dummy_requests(lora_config: LoRAConfig) -> list[LoRARequest]:
    count = min(lora_config.max_loras, MOST_DUMMIES)
    return [LoRARequest(f"warmup_{slot}", slot + 1, "(warm-up)") for slot in range(count)]
