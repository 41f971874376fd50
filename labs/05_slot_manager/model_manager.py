"""A model's adapters: its wrapped layers, their slots, and the rows of a step.

Stands for vllm/lora/model_manager.py and vllm/lora/punica_wrapper/punica_selector.py (v0.22.1).
"""

from labs.kit.overlay import Todo
from operator import attrgetter

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.adapter_slots import AdapterSlots
from minivllm.lora.backend import Backend
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.memory_stats import lora_info, memory_stats
from minivllm.lora.runs_backend import RunsBackend
from minivllm.lora.seams import backends, slot_writers
from minivllm.lora.stats import LoRAStats
from minivllm.lora.wrapped_modules import WrappedModules
from minivllm.observe.event_log import EventLog

DEFAULT_LANGUAGE_WRAPPER_KEY = "language_model"  # vLLM's


class LRUCacheLoRAModelManager(AdapterSlots):
    """Wraps a model's layers, brings adapters into their slots, and tells the backend where each row's adapter is.

    lora_dtype   of the slots; adapters are converted to it when they are read
    stats        counters of what happens to adapters; no decision reads them

    vLLM: the same name. ValueError when the model does not support LoRA, has nothing to wrap, or not what
    `target_modules` names.
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
        self.punica_wrapper = make_backend(max_num_batched_tokens, max_num_seqs, device, lora_config)
        wrapped = WrappedModules(model, lora_config, self.punica_wrapper)
        make_writer = slot_writers.get(torch.device(device).type)
        super().__init__(lora_config, wrapped, make_writer and make_writer(wrapped, device))
        self.model, self.device, self.vocab_size = model, device, vocab_size
        self.lora_dtype = next(iter(wrapped.modules.values())).slots.a[0].dtype
        self.packed_modules_mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._last_mapping: tuple[LoRAMapping, list[int | None]] | None = None
        self.stats = LoRAStats()
        self.listeners += [self.stats, EventLog(self.get_adapter)]

    modules = property(attrgetter("wrapped.modules"))
    supported_lora_modules = property(attrgetter("wrapped.supported_lora_modules"))

    @property
    def punica_wrapper_mapping(self) -> dict[str, Backend]:
        """vLLM has a backend for each tower of a multimodal model; here there is one."""
        return {DEFAULT_LANGUAGE_WRAPPER_KEY: self.punica_wrapper}

    # region lab 5.3: a mapping counts only together with the slots it was made for
    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The slot table: (S,) adapter id in each slot, None = free. Made of `_active_adapters`, id -> slot."""
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
        self._translate(mapping)
        self.punica_wrapper.sync_slots()  # an adapter read again may sit in its old slot, with other weights
        for prepare in self.wrapped.before_step:
            prepare([self.get_adapter(held) for held in self.lora_index_to_id])
        if self.slot_writer is not None:
            self.slot_writer.begin_step(mapping.index_mapping, self.list_active_adapters())

    # ---- what people ask of it ------------------------------------------------------------------------------

    def get_memory_stats(self) -> dict[str, object]:
        """Bytes of slots and adapters, see `memory_stats`."""
        return memory_stats(self)

    def get_lora_info(self, adapter_id: int) -> dict[str, object]:
        """Name, rank, bytes, slot, pin and history of an adapter in memory; ValueError for another id."""
        return lora_info(self, adapter_id)

    def create_dummy_lora(
        self, lora_id: int, rank: int, embedding_modules: dict[str, str] | None = None
    ) -> LoRAModel:
        """An adapter of zeros over everything that is wrapped, for warm-up. vLLM: the same name."""
        return self.wrapped.dummy(lora_id, rank)


class LoRAModelManager(LRUCacheLoRAModelManager):
    """Refuses what does not fit, in either tier, where the engine's evicts. vLLM: `LoRAModelManager`.

    There the evicting manager is derived from this one, here it is the other way.
    """

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


def make_backend(
    max_num_batched_tokens: int, max_batches: int, device: torch.device | str, lora_config: LoRAConfig
) -> Backend:
    """The backend that `lora_config.punica_backend` names; "auto" is the quickest one for the device.

    "loops" and "grouped" run anywhere; others are in `seams.backends`, and say themselves where they do not.
    """
    name = lora_config.backend_on(device)
    if name in ("loops", "grouped"):
        return LoopsBackend(device) if name == "loops" else RunsBackend(device)
    return backends[name](max_num_batched_tokens, max_batches, device, lora_config)
