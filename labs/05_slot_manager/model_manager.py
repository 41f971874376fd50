"""Adapters in memory and in slots. Stands for vllm/lora/model_manager.py (v0.22.1)."""

from minivllm.labs import Todo
import time

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lru_cache import LRUCache
from minivllm.lora.punica_wrapper import PunicaWrapperBase, get_punica_wrapper
from minivllm.lora.replace import get_supported_lora_modules
from minivllm.lora.slot_writer import SlotWriter
from minivllm.lora.stats import AdapterReports, LoRAStats
from minivllm.lora.wrapped_modules import WrappedModules

DEFAULT_LANGUAGE_WRAPPER_KEY = "language_model"


class LoRAModelManager(AdapterReports):
    """Wraps a model's layers and moves adapters between memory and slots. vLLM: `LoRAModelManager`.

    Two tiers: *registered* adapters are in CPU memory (at most `capacity`), *active* ones are also copied into
    a slot (at most `lora_slots`). This class refuses what does not fit; `LRUCacheLoRAModelManager` evicts.
    ValueError when the model does not support LoRA, has nothing to wrap, or not what `target_modules` names.
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
            raise ValueError(f"Model {type(model).__name__} is not supported for LoRA; it needs SupportsLoRA")
        self.model = model
        self.lora_config = lora_config
        self.device = device
        self.vocab_size = vocab_size
        self.packed_modules_mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self.supported_lora_modules = get_supported_lora_modules(model)
        self.punica_wrapper_mapping: dict[str, PunicaWrapperBase] = {
            DEFAULT_LANGUAGE_WRAPPER_KEY: get_punica_wrapper(
                max_num_batched_tokens, max_num_seqs, device, lora_config=lora_config
            )
        }
        self.wrapped = WrappedModules(model, lora_config, self.punica_wrapper)
        self.slot_writer = SlotWriter(self.wrapped, device) if torch.device(device).type == "cuda" else None
        self.stats = LoRAStats()
        self._registered_adapters: LRUCache[LoRAModel] = LRUCache(self.capacity)  # id -> weights
        self._active_adapters: LRUCache[int] = LRUCache(self.lora_slots)  # id -> slot
        self._last_mapping: tuple[LoRAMapping, list[int | None]] | None = None

    @property
    def modules(self) -> dict[str, BaseLayerWithLoRA]:
        """Module name -> wrapped layer."""
        return self.wrapped.modules

    @property
    def lora_dtype(self) -> torch.dtype:
        """Of the slots; adapters are converted to it when they are read."""
        return next(iter(self.modules.values())).a_slots[0].dtype

    @property
    def punica_wrapper(self) -> PunicaWrapperBase:
        return self.punica_wrapper_mapping[DEFAULT_LANGUAGE_WRAPPER_KEY]

    @property
    def capacity(self) -> int:
        """Adapters that memory may hold."""
        return self.lora_config.max_cpu_loras

    @property
    def lora_slots(self) -> int:
        return self.lora_config.max_loras

    def __len__(self) -> int:
        return len(self._registered_adapters)

    # ---- memory ---------------------------------------------------------------------------------------------

    def check_adapter(self, lora: LoRAModel) -> None:
        """ValueError unless every module of the adapter exists here and fits; it may get this model's form."""
        self.wrapped.conform(lora)
        self.wrapped.check(lora)

    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Register: fold scaling in, pack, keep in memory. False, and just used, if the id is there already.

        ValueError when it does not fit the model, RuntimeError when memory is full; nothing has changed.
        """
        if adapter.id in self._registered_adapters:
            self.touch_adapter(adapter.id)
            return False
        self.check_adapter(adapter)
        self._make_room_in_memory()
        self._pack(adapter)
        self._registered_adapters.put(adapter.id, adapter)
        return True

    def _pack(self, adapter: LoRAModel) -> None:
        """Bring it into the form that slots are written from; for a GPU, into memory that it can copy from."""
        self.wrapped.pack(adapter)
        if self.slot_writer is not None:
            self.slot_writer.take(adapter)

    def _make_room_in_memory(self) -> None:
        """RuntimeError when memory is full."""
        if len(self) >= self.capacity:
            raise RuntimeError(
                f"No free adapter slots: memory holds {len(self)} adapters, as many as max_cpu_loras allows"
            )

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget the adapter, pinned or not, in both tiers. False for an unknown id."""
        self.deactivate_adapter(adapter_id)
        return self._registered_adapters.pop(adapter_id) is not None

    def remove_all_adapters(self) -> None:
        for adapter_id in self.list_adapters():
            self.remove_adapter(adapter_id)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Adapter id -> weights of all in memory, the least recently used first."""
        return self._registered_adapters.cache

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """The weights if they are in memory. Looking does not count as use."""
        return self._registered_adapters.peek(adapter_id)

    def touch_adapter(self, adapter_id: int) -> None:
        """Mark as just used, wherever it is."""
        for tier in (self._registered_adapters, self._active_adapters):
            if adapter_id in tier:
                tier.touch(adapter_id)

    def create_dummy_lora(
        self, lora_id: int, rank: int, embedding_modules: dict[str, str] | None = None
    ) -> LoRAModel:
        """An adapter of zeros over everything that is wrapped, for warm-up. vLLM: the same name."""
        return self.wrapped.dummy(lora_id, rank)

    # ---- slots ----------------------------------------------------------------------------------------------

    def list_active_adapters(self) -> dict[int, int]:
        """Adapter id -> slot, the least recently used first."""
        return self._active_adapters.cache

    # region lab 5.2: copy first, then say so
    def activate_adapter(self, lora_id: int) -> bool:
        """Copy a registered adapter into a slot. False, and just used, if it is in one already.

        ValueError that names an id that is not registered, before `_find_slot` evicts anybody for it. The slot
        table names an adapter only once all its weights are there; a failed copy leaves the slot free.
        """
        # `self.slot_writer.write(lora, slot)` copies, without a GPU `self.wrapped.write`; `self.stats` counts the
        # copy and its seconds by `time.perf_counter`.
        raise Todo("lab 5.2: copy first, then say so")

    # endregion

    def _find_slot(self) -> int:
        """A free slot; ValueError when there is none."""
        if not (free := self.get_free_slots()):
            raise ValueError(f"No free lora slots: they hold adapters {self.lora_index_to_id}")
        return free[0]

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Take the adapter out of its slot; a pin goes with it. False if it is in none.

        Its weights stay there until others overwrite them: no row is sent to a slot that the table calls free.
        """
        return self._active_adapters.pop(adapter_id) is not None

    def pin_adapter(self, lora_id: int) -> bool:
        raise NotImplementedError("LoRAModelManager cannot pin. Use LRUCacheLoRAModelManager for pinning")

    @property
    def pinned_adapters(self) -> set[int]:
        """Adapters that keep their slot and their place in memory."""
        return self._active_adapters.pinned_items

    # region lab 5.3: a mapping counts only together with the slots it was made for
    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The slot table: (S,) adapter id in each slot, None = free. Made of `_active_adapters`, id -> slot."""
        raise Todo("lab 5.3: a mapping counts only together with the slots it was made for")

    def _translate(self, mapping: LoRAMapping) -> None:
        """Have the backend translate the rows' adapter ids to slots, unless the last translation still holds.

        The memo's key has the slot table: the same ids may sit in other slots than a step ago. While it is replaced
        nothing is remembered. The backend is told of one adapter more than slots: vLLM counts the base model.
        """
        raise Todo("lab 5.3: a mapping counts only together with the slots it was made for")

    # endregion

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Tell the backend which adapter each row of the coming step has."""
        self._translate(mapping)
        self.punica_wrapper.sync_slots()  # an adapter read again may sit in its old slot, with other weights
        if self.wrapped.rotaries:
            self.wrapped.stretch_rotaries([self.get_adapter(held) for held in self.lora_index_to_id])
        if self.slot_writer is not None:
            self.slot_writer.begin_step(mapping.index_mapping, self.list_active_adapters())


class LRUCacheLoRAModelManager(LoRAModelManager):
    """The manager that makes room: what was used longest ago goes, in either tier. vLLM: the same name.

    in_use   adapters of the running requests. Neither they nor pinned ones are evicted; RuntimeError when that
             leaves none.
    """

    in_use: frozenset[int] = frozenset()

    # region lab 5.4: who has to go
    def _make_room_in_memory(self) -> None:
        """When memory is full, what was used longest ago leaves it."""
        raise Todo("lab 5.4: who has to go")

    def remove_oldest_adapter(self) -> bool:
        """Drop the least recently used adapter from memory. False when memory is empty.

        It leaves its slot, too: an id that is not in memory may come back with other weights. `self.stats` counts
        the drop and, if it had a slot, the eviction.
        """
        raise Todo("lab 5.4: who has to go")

    def _find_slot(self) -> int:
        """A free slot, or that of the active adapter used longest ago, which stays in memory; counted likewise."""
        raise Todo("lab 5.4: who has to go")

    # endregion

    def has_room_for(self, adapter_id: int) -> bool:
        """Whether `activate_adapter` would find a slot: its own, a free one, or one that may be evicted."""
        kept = self.in_use | self.pinned_adapters
        return adapter_id in self._active_adapters or any(held not in kept for held in self.lora_index_to_id)

    # region lab 5.5: a pin holds a slot
    def pin_adapter(self, lora_id: int) -> bool:
        """Keep a registered adapter in a slot, and so in memory, until it is unpinned or removed.

        ValueError that names an unknown id, RuntimeError when no slot can be had. Nothing is pinned then: the slot,
        which may fail, comes first, and the pin is noted in one place for both tiers, `_active_adapters`.
        """
        raise Todo("lab 5.5: a pin holds a slot")

    def unpin_adapter(self, lora_id: int) -> bool:
        """Let an adapter be evicted again. False if it was not pinned."""
        raise Todo("lab 5.5: a pin holds a slot")

    # endregion

    # region lab 5.6: other weights under the same id
    def replace_adapter(self, adapter: LoRAModel) -> None:
        """Put other weights under a registered id, in memory and, if it has a slot, there; a pin holds on.

        ValueError that names an unknown id or what does not fit, and nothing has changed. If copying fails the
        old weights are served on: they are back in memory and, if pinned, in a slot.
        """
        raise Todo("lab 5.6: other weights under the same id")

    # endregion


def create_lora_manager(
    model: nn.Module,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    lora_config: LoRAConfig,
    vllm_config: object | None,
    device: torch.device | str,
    lora_manager_cls: type[LoRAModelManager] = LoRAModelManager,
) -> LoRAModelManager:
    """A manager for a model, which it wraps. vLLM: the same name."""
    return lora_manager_cls(
        model, max_num_seqs, max_num_batched_tokens, vocab_size, lora_config, device, vllm_config
    )
