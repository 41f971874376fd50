"""The LoRA side of a model runner. Stands for vllm/v1/worker/lora_model_runner_mixin.py (v0.22.1)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.errors import RuntimeRefusal
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.owned_managers import AdapterOwner, OwnedWorkerManager

# Dummy adapters at most: more of them take no other path through any kernel, and each takes memory.
MOST_DUMMIES = 8


class LoRAModelRunnerMixin:
    """Gives a model runner adapters. vLLM: `LoRAModelRunnerMixin`.

    worker_manager      brings adapters into memory and slots; None without LoRA
    make_lora_manager   (config, device) -> what `worker_manager` becomes
    owner               the engine that the runner serves; None for a runner by itself
    """

    worker_manager: LRUCacheWorkerLoRAManager | None = None
    owner: AdapterOwner | None = None
    make_lora_manager: Callable[[Any, Any], LRUCacheWorkerLoRAManager] = LRUCacheWorkerLoRAManager

    def load_lora_model(self, model: nn.Module, vllm_config: object, device: torch.device | str) -> nn.Module:
        """Wrap the model's layers, once, and give the model back."""
        self.worker_manager = self.make_lora_manager(vllm_config, device)
        return self.worker_manager.create_lora_manager(model)

    def serve_for(self, owner: AdapterOwner) -> None:
        """From now on an engine owns the adapters: `add_lora`, `remove_lora`, `pin_lora` and `lora_manager` lead to it.

        The owner works with `worker_manager`, and so do the runner's steps.
        """
        self.owner = owner

    @property
    def lora_manager(self) -> LRUCacheWorkerLoRAManager | OwnedWorkerManager | None:
        """The `worker_manager` as callers see it: what changes adapters leads to the owner, if there is one."""
        if self.owner is None or self.worker_manager is None:
            return self.worker_manager
        return OwnedWorkerManager(self.worker_manager, self.owner)

    def _manager(self) -> LRUCacheWorkerLoRAManager:
        if self.worker_manager is None:
            raise RuntimeError("LoRA is not enabled. Use enable_lora=True to enable LoRA.")
        return self.worker_manager

    # region lab 7.2: the adapters of a step
    def set_active_loras(
        self,
        input_batch: InputBatch,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray | None = None,
    ) -> None:
        """Called before every forward pass. Afterwards each adapter of the batch is in a slot, and the backend has the
        slot of every token and of every sampled row, as the slots are now.

        A pass computes with what the backend heard last. If nobody spoke before a step of base rows, or before one
        that looks like the last one while adapters have moved, it would compute with another user's adapter. So the
        manager hears of every step, once; it knows itself what it need not do again.

        num_scheduled_tokens   (P,) int, tokens of each row. A captured graph counts other ones than the batch
        num_sampled_tokens     (P,) int; None = each row samples one, also a row without tokens

        What the manager gets is prefill, as it is called in vLLM (`is_prefill`), whatever the rows do. RuntimeError
        when LoRA is off.
        """
        if num_sampled_tokens is None:
            num_sampled_tokens = np.ones_like(num_scheduled_tokens)
        prompt_mapping, token_mapping, lora_requests = input_batch.make_lora_inputs(
            num_scheduled_tokens, num_sampled_tokens
        )
        mapping = LoRAMapping(token_mapping, prompt_mapping, is_prefill=True)
        self._manager().set_active_adapters(lora_requests, mapping)

    # endregion

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of its first request; with `load_inplace`, again. Errors as when loading.

        Of an engine's runner this is the engine's `add_lora`, and likewise `remove_lora` and `pin_lora`.
        """
        if self.owner is not None:
            return self.owner.add_lora(lora_request)
        return self._manager().add_adapter(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        if self.owner is not None:
            return self.owner.remove_lora(lora_id)
        return self._manager().remove_adapter(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        if self.owner is not None:
            return self.owner.pin_lora(lora_id)
        return self._manager().pin_adapter(lora_id)

    def list_loras(self) -> set[int]:
        return self._manager().list_adapters()

    def has_lora(self, lora_id: int) -> bool:
        """Whether requests may name an engine's adapter; of a runner by itself, whether it is in memory."""
        if self.owner is not None:
            return self.owner.has_lora(lora_id)
        return self._manager().has_adapter(lora_id)

    def can_prefetch_lora(self, lora_id: int) -> bool:
        """Whether an adapter is in memory, in no slot, and could be copied into one while a step runs, on a GPU."""
        manager = self.worker_manager.manager
        if manager.slot_writer is None or manager.get_adapter(lora_id) is None:
            return False
        return lora_id not in manager.list_active_adapters()

    def prefetch_lora(self, lora_id: int) -> None:
        """Activate an adapter that the step launched last does not use, while that step runs; if there is room."""
        manager = self.worker_manager.manager
        if self.can_prefetch_lora(lora_id) and manager.has_room_for(lora_id):
            # What is wrong with the adapter is raised again in the step that it is for.
            with manager.slot_writer.behind_step(), suppress(Exception):
                manager.activate_adapter(lora_id)

    # ---- adapters of zeros, for dummy steps -----------------------------------------------------------------

    @contextmanager
    def maybe_setup_dummy_loras(
        self, lora_config: LoRAConfig | None, remove_lora: bool = True
    ) -> Iterator[None]:
        """Inside, adapters of zeros with ids 1, 2, ... are in memory: one for each slot, but at most `MOST_DUMMIES`.

        RuntimeError for an engine's runner that has other adapters in memory, whose ids these would take, and where
        these are to stay.
        """
        if lora_config is None:
            yield
            return
        if self.owner is not None and (self.list_loras() or not remove_lora):
            raise RuntimeRefusal(
                f"adapters of zeros would take the ids of the engine's own (in memory: {sorted(self.list_loras())}); "
                "call engine.remove_lora for these first, and let remove_lora be True"
            )
        manager = self.worker_manager.manager
        with manager.tiers.muted():
            for request in _dummy_requests(lora_config):
                self.worker_manager.add_dummy_lora(request, rank=min(lora_config.max_lora_rank, 8))
            yield
            if remove_lora:
                manager.remove_all_adapters()

    def select_dummy_loras(
        self,
        lora_config: LoRAConfig | None,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray,
        with_lora: bool = True,
    ) -> None:
        """Give the rows of a pass the dummy adapters in rotation; without `with_lora` all are base rows.

        num_scheduled_tokens, num_sampled_tokens   (P,) int
        """
        if lora_config is None:
            return
        ids = with_lora * (np.arange(len(num_scheduled_tokens)) % len(_dummy_requests(lora_config)) + 1)
        mapping = LoRAMapping(
            tuple(ids.repeat(num_scheduled_tokens).tolist()), tuple(ids.repeat(num_sampled_tokens).tolist())
        )
        self.worker_manager.set_active_adapters(_dummy_requests(lora_config), mapping)

    @contextmanager
    def maybe_dummy_run_with_lora(
        self,
        lora_config: LoRAConfig | None,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray,
        remove_lora: bool = True,
    ) -> Iterator[None]:
        """Inside, a forward pass runs as a batch over all slots would, on adapters of zeros; for warm-up.

        num_scheduled_tokens, num_sampled_tokens   (P,) int, the rows of the pass; adapters in rotation
        """
        with self.maybe_setup_dummy_loras(lora_config, remove_lora):
            self.select_dummy_loras(lora_config, num_scheduled_tokens, num_sampled_tokens)
            yield


def _dummy_requests(lora_config: LoRAConfig) -> list[LoRARequest]:
    count = min(lora_config.max_loras, MOST_DUMMIES)
    return [LoRARequest(f"warmup_{slot}", slot + 1, "(warm-up)") for slot in range(count)]
