"""A model's adapters: brought into memory and into the slots of its layers, and found there by the rows of a step.

Stands for vllm/lora/model_manager.py and vllm/lora/punica_wrapper/punica_selector.py (v0.22.1).
"""

from labs.kit.overlay import Todo
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.backend import Backend
from minivllm.lora.events import AdapterStats, LoRAStats
from minivllm.lora.extensions import PLAIN, LoRAExtensions
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.memory_stats import memory_stats
from minivllm.lora.runs_backend import RunsBackend
from minivllm.lora.tiers import AdapterTiers, FullTiers, MakeCache, least_recently_used
from minivllm.lora.wrapping import WrappedModules

DEFAULT_LANGUAGE_WRAPPER_KEY = "language_model"  # vLLM's


def make_backend(
    max_num_batched_tokens: int,
    max_batches: int,
    device: torch.device | str,
    lora_config: LoRAConfig,
    extensions: LoRAExtensions = PLAIN,
) -> Backend:
    """The backend that `lora_config.punica_backend` names; "auto" is the quickest one for the device.

    "loops" and "grouped" run anywhere; others are extensions, and say themselves where they do not. ValueError for one
    that is not among them.
    """
    name = lora_config.backend_on(device)
    if name in ("loops", "grouped"):
        return LoopsBackend(device) if name == "loops" else RunsBackend(device)
    if name not in extensions.backends:
        known = ", ".join(["loops", "grouped", *extensions.backends])
        raise ValueError(f"punica backend '{name}' is not installed; there are {known}")
    return extensions.backends[name](max_num_batched_tokens, max_batches, device, lora_config)


class LRUCacheLoRAModelManager:
    """Wraps a model's layers, copies adapters into their slots, and tells the backend where each row's adapter is.

    tiers           who is in memory, who is in which slot, and who may be evicted
    wrapped         the model's layers, which judge, pack and write weights
    punica_wrapper  the backend, which computes
    slot_writer     writes slots in the place of the layers, on a GPU; else None
    stats           counters of what happens to adapters; no decision reads them

    What differs from one device or configuration to another is given to the constructor:

    make_backend      (tokens, requests, device, config, extensions) -> the backend
    make_slot_writer  (wrapped layers, device) -> the slots' writer; None = the layers write
    make_cache        makes the cache of each tier, which says who has to go
    wrap              (model, config, backend, extensions) -> the wrapped layers
    extensions        what adapters may have beyond the plain case

    vLLM: the same name. ValueError when the model does not support LoRA, has nothing to wrap, or not what
    `target_modules` names.
    """

    _tiers_class = AdapterTiers

    def __init__(
        self,
        model: nn.Module,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        lora_config: LoRAConfig,
        device: torch.device | str,
        vllm_config: object | None = None,
        *,
        make_backend: Callable[..., Backend] = make_backend,
        make_slot_writer: Callable[[WrappedModules, torch.device | str], Any] | None = None,
        make_cache: MakeCache = least_recently_used,
        wrap: Callable[..., WrappedModules] = WrappedModules,
        extensions: LoRAExtensions = PLAIN,
    ) -> None:
        if not getattr(model, "supports_lora", False):
            raise ValueError(f"Model {type(model).__name__} is not supported for LoRA; it needs SupportsLoRA")
        self.model, self.device, self.vocab_size, self.lora_config = model, device, vocab_size, lora_config
        self.extensions = extensions
        self.packed_modules_mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self.punica_wrapper = make_backend(
            max_num_batched_tokens, max_num_seqs, device, lora_config, extensions
        )
        self.wrapped = wrap(model, lora_config, self.punica_wrapper, extensions)
        self.slot_writer = make_slot_writer and make_slot_writer(self.wrapped, device)
        self.tiers = self._tiers_class(lora_config, make_cache)
        self.stats = LoRAStats()
        self.listeners.append(self.stats)
        self._last_mapping: tuple[LoRAMapping, list[int | None]] | None = None
        self._mapped_at: tuple[object, ...] | None = None  # `version` when the last mapping was set

    # ---- who is where: of the tiers ---------------------------------------------------------------------------

    capacity = property(attrgetter("tiers.capacity"))
    lora_slots = property(attrgetter("tiers.lora_slots"))
    pinned_adapters = property(attrgetter("tiers.pinned"))
    in_use = property(attrgetter("tiers.in_use"))
    kept = property(attrgetter("tiers.kept"))
    version = property(attrgetter("tiers.version"))
    listeners = property(attrgetter("tiers.listeners"))
    tell = property(attrgetter("tiers.tell"))

    def __len__(self) -> int:
        return len(self.tiers.memory)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Adapter id -> weights of all in memory, the least recently used first. A copy."""
        return dict(self.tiers.memory)

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """The weights if they are in memory. Looking does not count as use."""
        return self.tiers.memory.get(adapter_id)

    def list_active_adapters(self) -> dict[int, int]:
        """Adapter id -> slot, the least recently used first. A copy."""
        return dict(self.tiers.slots)

    def get_free_slots(self) -> list[int]:
        """Slots that no adapter is in."""
        return self.tiers.get_free_slots()

    def set_in_use(self, adapter_ids: Iterable[int]) -> None:
        """From now on these adapters are in use, so that nobody may evict or drop them, and no others."""
        self.tiers.set_in_use(adapter_ids)

    def touch_adapter(self, adapter_id: int) -> None:
        """Mark as just used, wherever it is."""
        self.tiers.touch(adapter_id)

    def has_room_for(self, adapter_id: int) -> bool:
        """Whether the adapter has a slot, or could have one with nobody evicted who is pinned or in use."""
        return self.tiers.has_room_for(adapter_id)

    def remove_oldest_adapter(self) -> bool:
        """Drop the least recently used adapter that may go from memory and its slot. False when memory is empty."""
        return self.tiers.remove_oldest_adapter()

    # ---- into memory, into slots, and out ----------------------------------------------------------------------

    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Accept an adapter and keep it in memory. False, and just used, if the id is there already.

        ValueError when it does not fit the model, RuntimeError when nobody in memory may go; nothing has changed.
        """
        if adapter.id in self.tiers.memory:
            self.touch_adapter(adapter.id)
            return False
        self.wrapped.accept(adapter)
        self.tiers.make_room_in_memory()
        self.stage(adapter)
        self.tiers.memory.put(adapter.id, adapter)
        return True

    def stage(self, adapter: LoRAModel) -> None:
        """For a GPU: move an accepted adapter's weights into page-locked memory, which it can copy from."""
        if self.slot_writer is not None:
            self.slot_writer.stage(adapter)

    def write_slot(self, adapter: LoRAModel, slot: int) -> None:
        """Copy an accepted adapter into a slot, of which the tables hear nothing. When it raises, the slot is empty."""
        (self.slot_writer or self.wrapped).write(adapter, slot)

    # region lab 5.2: into a slot, also when the copy fails
    # A blank page. What it promises: `lab api 5.2`, or labs/05_slot_manager/contracts/5.2.md
    def activate_adapter(self, lora_id: int) -> bool:
        raise Todo("lab 5.2: into a slot, also when the copy fails")

    # endregion

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Take the adapter out of its slot; a pin goes with it. False if it is in none.

        Its weights stay there until others overwrite them: no row is sent to a slot that the table calls free.
        """
        self.tiers.pinned.discard(adapter_id)
        return self.tiers.slots.pop(adapter_id, None) is not None

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget the adapter, pinned or not, in both tiers. False for an unknown id."""
        self.deactivate_adapter(adapter_id)
        if was_there := self.tiers.memory.pop(adapter_id, None) is not None:
            self.tell("remove", adapter_id)
        return was_there

    def remove_all_adapters(self) -> None:
        for adapter_id in self.list_adapters():
            self.remove_adapter(adapter_id)

    # region lab 5.5: a pin holds a slot
    def pin_adapter(self, lora_id: int) -> bool:
        """Keep a registered adapter in a slot, and so in memory, until it is unpinned or removed.

        ValueError that names an unknown id, RuntimeError when no slot can be had. Nothing is pinned then: the slot,
        which may fail, comes first. The pin is noted in one place for both tiers, `pinned_adapters`.
        """
        raise Todo("lab 5.5: a pin holds a slot")

    def unpin_adapter(self, lora_id: int) -> bool:
        """Let an adapter be evicted again. False if it was not pinned."""
        raise Todo("lab 5.5: a pin holds a slot")

    # endregion

    # region lab 5.6: other weights under the same id
    def replace_adapter(self, adapter: LoRAModel) -> None:
        """Put other weights under a registered id, in memory and, if it has a slot, there; a pin holds on.

        ValueError that names an unknown id or what does not fit, and nothing has changed. What fits is staged
        (`stage`) first, as by `add_adapter`. If copying fails the old weights are served on: they are back in memory
        and, if pinned, in a slot.
        """
        raise Todo("lab 5.6: other weights under the same id")

    # endregion

    def create_dummy_lora(
        self, lora_id: int, rank: int, embedding_modules: dict[str, str] | None = None
    ) -> LoRAModel:
        """An adapter of zeros over everything that is wrapped, for warm-up. vLLM: the same name."""
        return self.wrapped.dummy(lora_id, rank)

    # ---- the rows of a step -------------------------------------------------------------------------------------

    # region lab 5.3: a mapping counts only together with the slots it was made for
    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The slot table: (S,) adapter id in each slot, None = free. Made of `tiers.slots`, id -> slot."""
        raise Todo("lab 5.3: a mapping counts only together with the slots it was made for")

    def _translate(self, mapping: LoRAMapping) -> None:
        """Have the backend translate the rows' adapter ids to slots, unless the last translation still holds.

        The memo's key has the slot table: the same ids may sit in other slots than a step ago. While it is replaced
        nothing is remembered.
        """
        raise Todo("lab 5.3: a mapping counts only together with the slots it was made for")

    # endregion

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Tell the backend which adapter each row of the coming step has."""
        self._mapped_at = None  # until all is done, the backend is between two steps
        self._translate(mapping)
        self.punica_wrapper.sync_slots()  # an adapter read again may sit in its old slot, with other weights
        for option in self.wrapped.following:
            option.before_step([self.get_adapter(held) for held in self.lora_index_to_id])
        if self.slot_writer is not None:
            self.slot_writer.begin_step(mapping.index_mapping, self.list_active_adapters())
        self._mapped_at = self.version

    def has_set(self, mapping: LoRAMapping | None) -> bool:
        """Whether this is the mapping that was set last, and nothing has happened to any adapter since."""
        if self._mapped_at != self.version or self._last_mapping is None:
            return False
        return self._last_mapping[0] == mapping

    # ---- for people -----------------------------------------------------------------------------------------------

    modules = property(attrgetter("wrapped.modules"))
    supported_lora_modules = property(attrgetter("wrapped.supported_lora_modules"))

    @property
    def lora_dtype(self) -> torch.dtype:
        """Of the slots; adapters are converted to it when they are read."""
        return next(iter(self.modules.values())).slots.a[0].dtype

    @property
    def punica_wrapper_mapping(self) -> dict[str, Backend]:
        """vLLM has a backend for each tower of a multimodal model; here there is one."""
        return {DEFAULT_LANGUAGE_WRAPPER_KEY: self.punica_wrapper}

    def get_memory_stats(self) -> dict[str, object]:
        """Bytes of slots and adapters, see `memory_stats`."""
        return memory_stats(
            self.wrapped, self.punica_wrapper, self.slot_writer, self.tiers.memory, self.tiers.slots
        )

    def get_lora_info(self, adapter_id: int) -> dict[str, object]:
        """Name, rank, bytes, slot, pin and history of an adapter in memory; ValueError for another id."""
        lora = self.get_adapter(adapter_id)
        if lora is None:
            raise ValueError(
                f"adapter {adapter_id} is not registered; registered are {sorted(self.list_adapters())}"
            )
        return {
            "id": adapter_id,
            "name": lora.name,
            "rank": lora.rank,
            "bytes": lora.nbytes,
            "slot": self.tiers.slots.get(adapter_id),
            "pinned": adapter_id in self.pinned_adapters,
            **asdict(self.stats.by_adapter.get(adapter_id, AdapterStats())),
        }


class LoRAModelManager(LRUCacheLoRAModelManager):
    """Refuses what does not fit, in either tier, where the engine's evicts. vLLM: `LoRAModelManager`.

    There the evicting manager is derived from this one, here it is the other way.
    """

    _tiers_class = FullTiers

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
    *,
    extensions: LoRAExtensions = PLAIN,
) -> LRUCacheLoRAModelManager:
    """A manager for a model, which it wraps. vLLM: the same name."""
    return lora_manager_cls(
        model,
        max_num_seqs,
        max_num_batched_tokens,
        vocab_size,
        lora_config,
        device,
        vllm_config,
        extensions=extensions,
    )
