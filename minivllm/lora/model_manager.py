"""A model's adapters: its wrapped layers, their slots, and the rows of a step.

Stands for vllm/lora/model_manager.py and vllm/lora/punica_wrapper/punica_selector.py (v0.22.1).
"""

from operator import attrgetter

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.adapter_slots import AdapterSlots
from minivllm.lora.backend import Backend
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.runs_backend import RunsBackend
from minivllm.lora.seams import backends, listeners, slot_writers
from minivllm.lora.wrapped_modules import WrappedModules


class LRUCacheLoRAModelManager(AdapterSlots):
    """Wraps a model's layers, brings adapters into their slots, and tells the backend where each row's adapter is.

    lora_dtype   of the slots; adapters are converted to it when they are read

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
        self.listeners += [listen(self) for listen in listeners]

    modules = property(attrgetter("wrapped.modules"))
    supported_lora_modules = property(attrgetter("wrapped.supported_lora_modules"))

    # region lab 5.3: a mapping counts only together with the slots it was made for
    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The slot table: (S,) adapter id in each slot, None = free. Made of `_active_adapters`, id -> slot."""
        table: list[int | None] = [None] * self.lora_slots
        for adapter_id, slot in self.list_active_adapters().items():
            table[slot] = adapter_id
        return table

    def _translate(self, mapping: LoRAMapping) -> None:
        """Have the backend translate the rows' adapter ids to slots, unless the last translation still holds.

        The memo's key has the slot table: the same ids may sit in other slots than a step ago. While it is replaced
        nothing is remembered.
        """
        slots = self.lora_index_to_id
        if (mapping, slots) != self._last_mapping:
            self._last_mapping = None
            self.punica_wrapper.begin_step(mapping, slots)
            self._last_mapping = (mapping, slots)

    # endregion

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Tell the backend which adapter each row of the coming step has."""
        self._translate(mapping)
        self.punica_wrapper.sync_slots()  # an adapter read again may sit in its old slot, with other weights
        for prepare in self.wrapped.before_step:
            prepare([self.get_adapter(held) for held in self.lora_index_to_id])
        if self.slot_writer is not None:
            self.slot_writer.begin_step(mapping.index_mapping, self.list_active_adapters())


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
