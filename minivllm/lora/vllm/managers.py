"""Managers that refuse or forget where the engine's evict. Stands for the parents in vllm/lora/model_manager.py and
vllm/lora/worker_manager.py (v0.22.1); there the evicting ones are derived from these, here it is the other way."""

from collections.abc import Iterable

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.faults import put_down_to
from minivllm.lora.backend import Backend
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager

DEFAULT_LANGUAGE_WRAPPER_KEY = "language_model"


class LoRAModelManager(LRUCacheLoRAModelManager):
    """Refuses what does not fit, in either tier. vLLM: `LoRAModelManager`."""

    def _make_room_in_memory(self) -> None:
        """RuntimeError when memory is full."""
        if len(self) >= self.capacity:
            raise RuntimeError(
                f"No free adapter slots: memory holds {len(self)} adapters, as many as max_cpu_loras allows"
            )

    def _find_slot(self) -> int:
        """A free slot; ValueError when there is none."""
        if not (free := self.get_free_slots()):
            raise ValueError(f"No free lora slots: they hold adapters {self.lora_index_to_id}")
        return free[0]

    def pin_adapter(self, lora_id: int) -> bool:
        raise NotImplementedError("LoRAModelManager cannot pin. Use LRUCacheLoRAModelManager for pinning")


def create_lora_manager(
    model: nn.Module,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    lora_config: LoRAConfig,
    vllm_config: object | None,
    device: torch.device | str,
    lora_manager_cls: type[LRUCacheLoRAModelManager] = LoRAModelManager,
) -> LRUCacheLoRAModelManager:
    """A manager for a model, which it wraps. vLLM: the same name."""
    return lora_manager_cls(
        model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, device, vllm_config
    )


class WorkerLoRAManager(LRUCacheWorkerLoRAManager):
    """Loads what a step needs and forgets everything else. vLLM: `WorkerLoRAManager`."""

    _manager_cls = LoRAModelManager

    def _apply_adapters(self, requests: Iterable[LoRARequest]) -> None:
        """Load first, forget second: a bad adapter costs no good one its place."""
        wanted = self._distinct(requests)
        loaded = []
        for adapter_id in wanted.keys() - self.list_adapters():
            with put_down_to(adapter_id):
                loaded.append(self._timed_load(wanted[adapter_id]))
        for adapter_id in self.list_adapters() - wanted.keys():
            self.remove_adapter(adapter_id)
        for lora in loaded:
            self.manager.add_adapter(lora)
        # vLLM goes through a set, too, and its tests know the order: adapters 6, 7, 8 get slots 1, 2, 0.
        for adapter_id in set(wanted):
            with put_down_to(adapter_id):
                self.manager.activate_adapter(adapter_id)

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load and activate. False if it was there already."""
        if lora_request.lora_int_id in self.list_adapters():
            return False
        self.manager.add_adapter(self._timed_load(lora_request))
        return self.manager.activate_adapter(lora_request.lora_int_id)


# Names of vLLM's that the core's classes do without.


def punica_wrapper_mapping(self: LRUCacheLoRAModelManager) -> dict[str, Backend]:
    """vLLM has a backend for each tower of a multimodal model; here there is one."""
    return {DEFAULT_LANGUAGE_WRAPPER_KEY: self.punica_wrapper}


def remove_all_adapters(self: LRUCacheWorkerLoRAManager) -> None:
    self.manager.remove_all_adapters()


LRUCacheLoRAModelManager.punica_wrapper_mapping = property(punica_wrapper_mapping)
LRUCacheWorkerLoRAManager.remove_all_adapters = remove_all_adapters
