"""From requests to adapters in slots. Stands for vllm/lora/worker_manager.py (v0.22.1)."""

import time
from collections.abc import Iterable

import torch
from torch import nn

from minivllm.lora.layers import LoRAMapping
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager, create_lora_manager
from minivllm.lora.names import get_adapter_absolute_path
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest


class WorkerLoRAManager:
    """Loads what a step needs and forgets everything else. vLLM: `WorkerLoRAManager`.

    vllm_config   read of it: `.lora_config`, `.model_config.get_vocab_size()`,
                  `.scheduler_config.max_num_seqs` and `.max_num_batched_tokens`
    """

    _manager_cls: type[LoRAModelManager] = LoRAModelManager

    def __init__(
        self,
        vllm_config: object,
        device: torch.device | str,
        embedding_modules: dict[str, str] | None = None,
    ) -> None:
        self.lora_config = vllm_config.lora_config
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.device = device
        self.embedding_modules = embedding_modules or {}
        self._adapter_manager: LoRAModelManager  # made by create_lora_manager

    @property
    def is_enabled(self) -> bool:
        return True

    @property
    def manager(self) -> LoRAModelManager:
        """The manager of slots and memory under this one."""
        return self._adapter_manager

    def create_lora_manager(self, model: nn.Module, vllm_config: object | None = None) -> nn.Module:
        """Wrap the model's layers and return the model."""
        self._adapter_manager = create_lora_manager(
            model,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.vocab_size,
            self.lora_config,
            self.device,
            vllm_config,
            self._manager_cls,
        )
        return self._adapter_manager.model

    # region lab 5.6: read an adapter
    def _load_adapter(self, lora_request: LoRARequest, shapes_only: bool = False) -> LoRAModel:
        """Read an adapter folder and check all of it; nothing in the engine has changed when this raises.

        FileNotFoundError: no folder, no config, no weights. ValueError: everything else, naming the adapter.
        """
        try:
            folder = get_adapter_absolute_path(lora_request.lora_path)
            peft_helper = PEFTHelper.from_local_dir(folder)
            peft_helper.validate_legal(self.lora_config)
            model = self._adapter_manager.model
            lora = LoRAModel.from_local_checkpoint(
                folder,
                self._expected_modules(),
                peft_helper,
                lora_model_id=lora_request.lora_int_id,
                dtype=self.lora_config.lora_dtype,
                model_vocab_size=self.vocab_size,
                weights_mapper=getattr(model, "hf_to_vllm_mapper", None),
                skip_prefixes=getattr(model, "lora_skip_prefixes", None),
                shapes_only=shapes_only,
            )
            self._adapter_manager.check_adapter(lora)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"adapter '{lora_request.lora_name}': {error}") from error
        lora.name = lora_request.lora_name
        return lora

    # endregion

    def _expected_modules(self) -> list[str]:
        """The ends of module names an adapter may use: the parts of fused modules, not the fused name."""
        packed = self._adapter_manager.packed_modules_mapping
        return [
            part for name in self._adapter_manager.supported_lora_modules for part in packed.get(name, [name])
        ]

    def check_adapter(self, lora_request: LoRARequest) -> None:
        """Raise what loading would raise, from the config and the header of the weights file alone.

        It cannot see what only the numbers tell: NaN or Inf.
        """
        self._load_adapter(lora_request, shapes_only=True)

    def _timed_load(self, lora_request: LoRARequest) -> LoRAModel:
        started = time.perf_counter()
        lora = self._load_adapter(lora_request)
        stats = self._adapter_manager.stats
        stats.loads += 1
        stats.load_seconds += time.perf_counter() - started
        stats.adapter(lora.id).loads += 1
        stats.record("load", lora.id)
        return lora

    def set_active_adapters(self, requests: Iterable[LoRARequest], mapping: LoRAMapping | None) -> None:
        """Bring every requested adapter into a slot, *then* translate the batch's ids to slots.

        RuntimeError for more distinct adapters than slots. Errors of loading pass through.
        """
        self._apply_adapters(requests)
        if mapping is not None:
            self._adapter_manager.set_adapter_mapping(mapping)

    def _apply_adapters(self, requests: Iterable[LoRARequest]) -> None:
        wanted = self._distinct(requests)
        for adapter_id in self.list_adapters() - wanted.keys():
            self.remove_adapter(adapter_id)
        for adapter_id in wanted.keys() - self.list_adapters():
            self.add_adapter(wanted[adapter_id])

    def _distinct(self, requests: Iterable[LoRARequest]) -> dict[int, LoRARequest]:
        """One request an adapter, by id, in the order of ids: sets have none of their own."""
        wanted = {request.lora_int_id: request for request in requests if request is not None}
        if len(wanted) > self._adapter_manager.lora_slots:
            raise RuntimeError(
                f"Number of requested LoRAs ({len(wanted)}) is greater than the number of GPU LoRA slots "
                f"({self._adapter_manager.lora_slots})."
            )
        return dict(sorted(wanted.items()))

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load and activate. False if it was there already."""
        if lora_request.lora_int_id in self.list_adapters():
            return False
        loaded = self._adapter_manager.add_adapter(self._timed_load(lora_request))
        self._adapter_manager.activate_adapter(lora_request.lora_int_id)
        return loaded

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        """Register an adapter of zeros under the request's id, without reading anything."""
        if lora_request.lora_int_id in self.list_adapters():
            return False
        dummy = self._adapter_manager.create_dummy_lora(
            lora_request.lora_int_id, rank, self.embedding_modules
        )
        return self._adapter_manager.add_adapter(dummy)

    def remove_adapter(self, adapter_id: int) -> bool:
        return self._adapter_manager.remove_adapter(adapter_id)

    def remove_all_adapters(self) -> None:
        self._adapter_manager.remove_all_adapters()

    def pin_adapter(self, adapter_id: int) -> bool:
        return self._adapter_manager.pin_adapter(adapter_id)

    def list_adapters(self) -> set[int]:
        return set(self._adapter_manager.list_adapters())


class LRUCacheWorkerLoRAManager(WorkerLoRAManager):
    """Loads what a step needs and keeps the rest until there is no room. vLLM: the same name."""

    _manager_cls = LRUCacheLoRAModelManager

    # region lab 5.7: load on demand, needed ones first
    def _apply_adapters(self, requests: Iterable[LoRARequest]) -> None:
        wanted = self._distinct(requests)
        failures = self.prepare_adapters(wanted.values())
        for error in failures.values():
            raise error
        stats = self._adapter_manager.stats
        for adapter_id in wanted:
            activated = self._adapter_manager.activate_adapter(adapter_id)
            stats.misses += activated
            stats.hits += not activated
            stats.adapter(adapter_id).steps += 1
            stats.adapter(adapter_id).last_used = time.time()

    def prepare_adapters(self, requests: Iterable[LoRARequest]) -> dict[int, Exception]:
        """Read into memory what is not there; what could not be read comes back as id -> error.

        All that the step needs is marked as used before anything is evicted: with slots [1, 2, 3] and a step
        that wants 4, 1 and 5, loading 4 first would evict 1, only for 1 to be copied in again.
        """
        wanted = self._distinct(requests)
        manager = self._adapter_manager
        manager.in_use = frozenset(wanted)
        for adapter_id in wanted:
            manager.touch_adapter(adapter_id)
        failures: dict[int, Exception] = {}
        for adapter_id in sorted(wanted.keys() - self.list_adapters()):
            try:
                manager.add_adapter(self._timed_load(wanted[adapter_id]))
            except (OSError, ValueError, RuntimeError) as error:
                failures[adapter_id] = error
        return failures

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load, and activate if a slot can be had; with `load_inplace` read again what is there.

        A request's `load_inplace` counts here, where somebody asks for a load, and not in
        `set_active_adapters`, which sees the same request at every step.
        Loading comes first: a bad adapter evicts nothing, and a failed reload leaves the old one serving.
        """
        manager = self._adapter_manager
        adapter_id = lora_request.lora_int_id
        known = adapter_id in self.list_adapters()
        if known and not lora_request.load_inplace:
            manager.touch_adapter(adapter_id)
        else:
            lora = self._timed_load(lora_request)
            if known:
                manager.replace_adapter(lora)
            else:
                manager.add_adapter(lora)
        if manager.has_room_for(adapter_id):
            manager.activate_adapter(adapter_id)
        return not known

    # endregion

    def unpin_adapter(self, adapter_id: int) -> bool:
        return self._adapter_manager.unpin_adapter(adapter_id)
