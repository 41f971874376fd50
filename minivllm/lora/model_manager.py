"""Adapters in memory and in slots. Stands for vllm/lora/model_manager.py (v0.22.1)."""

import time

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lru_cache import LRUCache
from minivllm.lora.punica_wrapper import PunicaWrapperBase, get_punica_wrapper
from minivllm.lora.replace import get_supported_lora_modules
from minivllm.lora.stats import LoRAStats
from minivllm.lora.wrapped_modules import WrappedModules

DEFAULT_LANGUAGE_WRAPPER_KEY = "language_model"


class LoRAModelManager:
    """Wraps a model's layers and moves adapters between memory and slots. vLLM: `LoRAModelManager`.

    Two tiers: *registered* adapters are in CPU memory (at most `capacity`), *active* ones are also copied into
    a slot (at most `lora_slots`). This class never evicts; `LRUCacheLoRAModelManager` does.

    lora_index_to_id   (S,) adapter id in each slot, None = free. An id stands there only once its weights do.
    in_use             adapters of running requests: never chosen for eviction

    Raises ValueError when the model does not support LoRA, has no layer to wrap, or `target_modules` names
    something that it does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        lora_config: LoRAConfig,
        device: torch.device | str,
        vllm_config: object | None = None,
    ) -> None:
        if not getattr(model, "supports_lora", False):
            raise ValueError(f"Model {type(model).__name__} is not supported for LoRA.")
        self.model = model
        self.lora_config = lora_config
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.packed_modules_mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self.supported_lora_modules = get_supported_lora_modules(model)
        self.lora_index_to_id: list[int | None] = [None] * self.lora_slots
        self.in_use: frozenset[int] = frozenset()
        self.stats = LoRAStats()
        self._registered_adapters: dict[int, LoRAModel] | LRUCache[LoRAModel] = {}
        self._active_adapters: dict[int, None] | LRUCache[None] = {}
        self._last_mapping: tuple[LoRAMapping, list[int | None]] | None = None
        self.punica_wrapper_mapping: dict[str, PunicaWrapperBase] = {
            DEFAULT_LANGUAGE_WRAPPER_KEY: get_punica_wrapper(
                max_num_batched_tokens, max_num_seqs, device, lora_config=lora_config
            )
        }
        self.wrapped = WrappedModules(model, lora_config, self.punica_wrapper)
        model.lora_manager = self

    @property
    def modules(self) -> dict[str, BaseLayerWithLoRA]:
        """Module name -> wrapped layer."""
        return self.wrapped.modules

    @property
    def packed_modules(self) -> dict[str, list[str]]:
        """Fused module name -> the names adapters give its parts."""
        return self.wrapped.packed_modules

    @property
    def capacity(self) -> int:
        """Adapters kept in memory."""
        return self.lora_config.max_cpu_loras

    @property
    def lora_slots(self) -> int:
        return self.lora_config.max_loras

    @property
    def adapter_slots(self) -> int:
        return self.lora_slots

    @property
    def punica_wrapper(self) -> PunicaWrapperBase:
        return self.punica_wrapper_mapping[DEFAULT_LANGUAGE_WRAPPER_KEY]

    def __len__(self) -> int:
        return len(self._registered_adapters)

    # ---- the CPU tier ---------------------------------------------------------------------------------------

    def check_adapter(self, lora: LoRAModel) -> None:
        """ValueError unless every module of the adapter exists here and fits; nothing changes."""
        self.wrapped.check(lora)

    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Register: scale, pack and keep in memory. False if the id is known already.

        ValueError: does not fit the model. RuntimeError: over capacity.
        """
        if adapter.id in self._registered_adapters:
            return False
        self.check_adapter(adapter)
        if len(self._registered_adapters) >= self.capacity:
            raise RuntimeError("No free adapter slots.")
        self.wrapped.pack(adapter)
        self._registered_adapters[adapter.id] = adapter
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget the adapter in both tiers. False for an unknown id."""
        self.deactivate_adapter(adapter_id)
        return self._registered_adapters.pop(adapter_id, None) is not None

    def remove_all_adapters(self) -> None:
        for adapter_id in list(self.list_adapters()):
            self.remove_adapter(adapter_id)

    def list_adapters(self) -> dict[int, LoRAModel]:
        return dict(self._registered_adapters)

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        return self._registered_adapters.get(adapter_id)

    # ---- slots ----------------------------------------------------------------------------------------------

    # region lab 5.2: an adapter into a slot
    def activate_adapter(self, lora_id: int) -> bool:
        """Copy a registered adapter into a slot. False if it is in one already.

        ValueError for an id that is not registered, or when no slot is free. The slot table names the
        adapter only after its weights have been copied; if the copy fails the slot is left empty.
        """
        if lora_id in self._active_adapters:
            return False
        lora = self.list_adapters().get(lora_id)
        if lora is None:
            raise ValueError(f"adapter {lora_id} is not registered, so it cannot be activated")
        slot = self._free_slot()
        started = time.perf_counter()
        self.wrapped.write(lora, slot)
        self.lora_index_to_id[slot] = lora_id
        self._active_adapters[lora_id] = None
        self._count_activation(lora_id, slot, time.perf_counter() - started)
        return True

    # endregion

    def _count_activation(self, lora_id: int, slot: int, seconds: float) -> None:
        self.stats.activations += 1
        self.stats.activate_seconds += seconds
        self.stats.adapter(lora_id).activations += 1
        self.stats.record("activate", lora_id, slot)

    def _count_eviction(self, lora_id: int, slot: int) -> None:
        self.stats.evictions += 1
        self.stats.record("evict", lora_id, slot)

    def _free_slot(self) -> int:
        if None not in self.lora_index_to_id:
            raise ValueError("No free lora slots")
        return self.lora_index_to_id.index(None)

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Take the adapter out of its slot. No memory is freed: slots are allocated once."""
        if adapter_id not in self._active_adapters:
            return False
        self._active_adapters.pop(adapter_id)
        self._vacate(adapter_id)
        return True

    def _vacate(self, adapter_id: int) -> None:
        self.lora_index_to_id[self.lora_index_to_id.index(adapter_id)] = None

    def list_active_adapters(self) -> dict[int, int]:
        """Adapter id -> slot."""
        return {adapter: slot for slot, adapter in enumerate(self.lora_index_to_id) if adapter is not None}

    def get_free_slots(self) -> list[int]:
        """Slots that hold nothing."""
        return [slot for slot, adapter in enumerate(self.lora_index_to_id) if adapter is None]

    def get_memory_stats(self) -> dict[str, object]:
        """Bytes: of the slot buffers (allocated once), of adapters in memory, and each adapter's own."""
        cpu = {adapter_id: lora.nbytes for adapter_id, lora in self.list_adapters().items()}
        slots = {adapter_id: cpu[adapter_id] for adapter_id in self.list_active_adapters()}
        return {
            "slot_buffers": self.lora_slots * self.wrapped.slot_bytes,
            "slot_bytes_by_adapter": slots,
            "cpu_total": sum(cpu.values()),
            "cpu_bytes_by_adapter": cpu,
        }

    def get_lora_info(self, adapter_id: int) -> dict[str, object]:
        """Name, rank, bytes, slot and history of a registered adapter; ValueError for another id."""
        lora = self.list_adapters().get(adapter_id)
        if lora is None:
            raise ValueError(
                f"adapter {adapter_id} is not registered; registered are {sorted(self.list_adapters())}"
            )
        return {
            "id": adapter_id,
            "name": lora.name,
            "rank": lora.rank,
            "bytes": lora.nbytes,
            "slot": self.list_active_adapters().get(adapter_id),
            "pinned": adapter_id in self.pinned_adapters,
            **vars(self.stats.adapter(adapter_id)),
        }

    def pin_adapter(self, lora_id: int) -> bool:
        raise NotImplementedError(
            "Pinning is not supported in LoRAModelManager. Use LRUCacheLoRAModelManager for pinning"
        )

    @property
    def pinned_adapters(self) -> set[int]:
        return set()

    # region lab 5.3: a mapping counts only together with the slots it was made for
    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Tell the backend which adapter each row of the coming step has; nothing to do if nothing moved.

        The slot table is part of the memo's key: the same ids may sit in other slots than a step ago.
        """
        key = (mapping, list(self.lora_index_to_id))
        if key != self._last_mapping:
            self.punica_wrapper.update_metadata(
                mapping, self.lora_index_to_id, self.lora_slots + 1, self.vocab_size
            )
            self._last_mapping = key

    # endregion

    def create_dummy_lora(
        self, lora_id: int, rank: int, embedding_modules: dict[str, str] | None = None
    ) -> LoRAModel:
        """An adapter of zeros over everything that is wrapped, for warm-up. vLLM: the same name."""
        return self.wrapped.dummy(lora_id, rank)


class LRUCacheLoRAModelManager(LoRAModelManager):
    """The manager that evicts, in both tiers, what was used longest ago. vLLM: the same name.

    Neither a pinned adapter nor one `in_use` is ever evicted; RuntimeError when that leaves none.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._registered_adapters = LRUCache(self.capacity, self._on_dropped)
        self._active_adapters = LRUCache(self.lora_slots)

    def list_adapters(self) -> dict[int, LoRAModel]:
        return self._registered_adapters.cache

    def _on_dropped(self, adapter_id: int, _: LoRAModel) -> None:
        """An adapter that left memory must not stay in a slot: its id may come back with other weights."""
        if adapter_id in self._active_adapters:
            self._count_eviction(adapter_id, self.lora_index_to_id.index(adapter_id))
            self.deactivate_adapter(adapter_id)

    # region lab 5.4: evict only for an adapter that is known to be good
    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Register, or mark as just used. Over capacity the oldest goes, after the new one proved sound."""
        if adapter.id in self._registered_adapters:
            self._registered_adapters.touch(adapter.id)
            return False
        self.check_adapter(adapter)
        if len(self) >= self.capacity:
            self.remove_oldest_adapter()
        self.wrapped.pack(adapter)
        self._registered_adapters.put(adapter.id, adapter)
        return True

    def replace_adapter(self, adapter: LoRAModel) -> None:
        """Put other weights under an id that is registered; a pin of the old ones holds for the new."""
        self.check_adapter(adapter)
        pinned = adapter.id in self.pinned_adapters
        self.remove_adapter(adapter.id)
        self.add_adapter(adapter)
        if pinned:
            self.pin_adapter(adapter.id)

    def remove_oldest_adapter(self) -> bool:
        """Drop the least recently used adapter from memory and slot. False when there is none at all."""
        if not len(self):
            return False
        victim = self._registered_adapters.remove_oldest(spare=self.in_use)
        self.stats.cpu_evictions += 1
        self.stats.record("drop", victim)
        return True

    def activate_adapter(self, lora_id: int) -> bool:
        """As in the base class; a full house makes room by evicting, an adapter already there is touched."""
        if lora_id in self._active_adapters:
            self.touch_adapter(lora_id)
            return False
        activated = super().activate_adapter(lora_id)
        self.touch_adapter(lora_id)
        return activated

    def _free_slot(self) -> int:
        if None not in self.lora_index_to_id:
            victim = self._active_adapters.remove_oldest(spare=self.in_use)
            slot = self.lora_index_to_id.index(victim)
            self._vacate(victim)
            self._count_eviction(victim, slot)
        return super()._free_slot()

    # endregion

    def has_room_for(self, adapter_id: int) -> bool:
        """Whether `activate_adapter` would find a slot: its own, a free one, or one that may be evicted."""
        kept = self.in_use | self.pinned_adapters
        return adapter_id in self._active_adapters or any(held not in kept for held in self.lora_index_to_id)

    def touch_adapter(self, adapter_id: int) -> None:
        """Mark as just used wherever it is."""
        for tier in (self._registered_adapters, self._active_adapters):
            if adapter_id in tier:
                tier.touch(adapter_id)

    # region lab 5.5: pin the slot first, then the memory
    def pin_adapter(self, lora_id: int) -> bool:
        """Keep an adapter in its slot and in memory until it is unpinned.

        ValueError for an unknown id; RuntimeError when no slot can be had. Then nothing is pinned: the slot
        comes first, since it is what can fail.
        """
        if lora_id not in self._registered_adapters:
            raise ValueError(f"Pinning failed. LoRA {lora_id} is not registered.")
        self.activate_adapter(lora_id)
        self._active_adapters.pin(lora_id)
        self._registered_adapters.pin(lora_id)
        return True

    # endregion

    def unpin_adapter(self, lora_id: int) -> bool:
        """Let an adapter be evicted again. False if it was not pinned."""
        if lora_id not in self.pinned_adapters:
            return False
        self._active_adapters.unpin(lora_id)
        self._registered_adapters.unpin(lora_id)
        return True

    @property
    def pinned_adapters(self) -> set[int]:
        return self._active_adapters.pinned_items


def create_lora_manager(
    model: nn.Module,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    lora_config: LoRAConfig,
    device: torch.device | str,
    vllm_config: object | None = None,
    lora_manager_cls: type[LoRAModelManager] = LoRAModelManager,
) -> LoRAModelManager:
    """A manager for a model that supports LoRA. vLLM: the same name."""
    return lora_manager_cls(
        model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, device, vllm_config
    )
