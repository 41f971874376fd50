"""From requests to adapters in slots. Stands for vllm/lora/worker_manager.py (v0.22.1)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from minivllm.errors import blamed_on, recoverable
from minivllm.lora.extensions import PLAIN, LoRAExtensions
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from minivllm.lora.plain_loading import keep_only
from minivllm.lora.request import LoRARequest


class LRUCacheWorkerLoRAManager:
    """Loads what a step needs and keeps other adapters until there is no room. vLLM: the same name.

    vllm_config   read of it: `.lora_config`, `.model_config.get_vocab_size()`, `.scheduler_config.max_num_seqs` and
                  `.max_num_batched_tokens`
    make_manager  makes the manager, with the arguments of `LRUCacheLoRAModelManager`; None = `_manager_cls`
    make_source   (manager) -> where adapters come from
    manager       of memory and slots, once `create_lora_manager` was called
    source        where adapters come from, likewise
    extensions    what adapters may have beyond the plain case
    """

    _manager_cls: type[LRUCacheLoRAModelManager] = LRUCacheLoRAModelManager
    manager: LRUCacheLoRAModelManager
    source: AdapterSource

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device | str,
        embedding_modules: dict[str, str] | None = None,
        *,
        make_manager: Callable[..., LRUCacheLoRAModelManager] | None = None,
        make_source: Callable[[LRUCacheLoRAModelManager], AdapterSource] = AdapterSource,
        extensions: LoRAExtensions = PLAIN,
    ) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.extensions = extensions
        self.make_manager, self.make_source = make_manager or self._manager_cls, make_source

    def create_lora_manager(self, model: nn.Module, vllm_config: object | None = None) -> nn.Module:
        """Wrap the model's layers and return the model."""
        config, scheduler = self.vllm_config, self.vllm_config.scheduler_config
        self.manager = self._adapter_manager = self.make_manager(
            model,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            config.model_config.get_vocab_size(),
            config.lora_config,
            self.device,
            extensions=self.extensions,
        )
        self.source = self.make_source(self.manager)
        return model

    def read_through(self, wrap: Callable[[AdapterSource], AdapterSource]) -> None:
        """From now on get adapters from another source.   wrap: gives it, around the one of before"""
        self.source = wrap(self.source)

    def _load(self, lora_request: LoRARequest) -> LoRAModel:
        """Read an adapter; listeners hear of a "load" with its seconds."""
        lora = self.source.load(lora_request)
        self.manager.tell("load", lora.id, seconds=lora.load_seconds, name=lora_request.lora_name)
        return lora

    def _load_if_missing(self, request: LoRARequest) -> None:
        """Read an adapter into memory unless it is there; `load_inplace` is not looked at."""
        if self.manager.get_adapter(request.lora_int_id) is None:
            self.manager.add_adapter(self._load(request))

    def _distinct(self, requests: Iterable[LoRARequest]) -> dict[int, LoRARequest]:
        """One request for each adapter by id, in the order of ids, since a set has no order.

        RuntimeError when they and the pinned ones are more than the slots.
        """
        wanted = {request.lora_int_id: request for request in requests if request is not None}
        pinned, slots = self.manager.pinned_adapters - wanted.keys(), self.manager.lora_slots
        if len(wanted) + len(pinned) > slots:
            also = f" plus {len(pinned)} pinned" if pinned else ""
            raise RuntimeError(
                f"Number of requested LoRAs ({len(wanted)}{also}) is greater than the number of GPU LoRA slots "
                f"({slots})."
            )
        return dict(sorted(wanted.items()))

    def set_active_adapters(self, requests: Iterable[LoRARequest], mapping: LoRAMapping | None) -> None:
        """Bring every requested adapter into a slot, *then* translate the batch's ids to slots.

        RuntimeError, and nothing has changed, when they and the pinned ones are more than the slots. Errors of
        loading pass through, put down to their adapter (`blamed_adapter`).

        In a step like the last one, with nothing changed in between, every adapter is in its slot: only the hits are
        told. On a GPU, where slots are written beside steps, the slots' writer hears of the step, too.
        """
        requests, manager = list(requests), self.manager
        wanted = {request.lora_int_id for request in requests if request is not None}
        if is_same := wanted == manager.in_use and manager.has_set(mapping):
            for adapter_id in sorted(wanted):
                manager.tell("hit", adapter_id)
        else:
            self._apply_adapters(requests)
        if mapping is not None and not (is_same and manager.slot_writer is None):
            manager.set_adapter_mapping(mapping)

    # region lab 5.7: load on demand, and spare what the step needs
    def _apply_adapters(self, requests: Iterable[LoRARequest]) -> None:
        """Bring a step's adapters into memory and slots.

        Listeners are told a "hit" for each adapter that was in a slot already, and a "miss" for each that was copied.
        An error on the way is marked with the id of the adapter that raised it (`blamed_on`).
        """
        for adapter_id, request in self._claim(requests).items():
            with blamed_on(adapter_id):
                self._load_if_missing(request)
                activated = self.manager.activate_adapter(adapter_id)
            self.manager.tell("miss" if activated else "hit", adapter_id)

    def _claim(self, requests: Iterable[LoRARequest]) -> dict[int, LoRARequest]:
        """The step's adapters by id, as `_distinct` has them. From here on these adapters, and no others, are `in_use`.

        The next step that is accepted replaces them. A step that `_distinct` refuses leaves `in_use` as it was.
        """
        wanted = self._distinct(requests)
        self.manager.set_in_use(wanted)
        return wanted

    def prepare_adapters(self, requests: Iterable[LoRARequest]) -> dict[int, BaseException]:
        """Read into memory each adapter of a step that is not there. One that cannot be read does not stop the others.

        All adapters of the step are `in_use` from here on (`_claim`), also those that could not be read.

        Returns adapter id -> the error that kept it out of memory. Only errors that the engine survives are returned:
        `recoverable(error)` gives such an error back, and raises any other, such as Ctrl-C.
        """
        failures: dict[int, BaseException] = {}
        for adapter_id, request in self._claim(requests).items():
            try:
                self._load_if_missing(request)
            except BaseException as error:
                failures[adapter_id] = recoverable(error)
        return failures

    # endregion

    # region lab 5.8: load when somebody asks for it
    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load, or with `load_inplace` load again, and activate if a slot can be had. True: it is in memory.

        Asking counts as use. Loading comes first: a bad adapter evicts nothing, and a failed reload leaves the old
        weights serving, also where only the copy into a slot fails; what that raises is raised here. RuntimeError
        when memory is full of adapters that are pinned or in use. Without a slot to be had (`has_room_for`) it
        waits in memory for the step that needs it.
        """
        manager = self.manager
        adapter_id = lora_request.lora_int_id
        old = manager.get_adapter(adapter_id)
        known = old is not None
        if known and lora_request.load_inplace:
            manager.replace_adapter(self._load(lora_request))
        else:
            self._load_if_missing(lora_request)
        manager.touch_adapter(adapter_id)
        if manager.has_room_for(adapter_id):
            try:
                manager.activate_adapter(adapter_id)
            except BaseException:
                if known:
                    manager.replace_adapter(old)
                raise
        return True

    # endregion

    def remove_adapter(self, adapter_id: int) -> bool:
        return self.manager.remove_adapter(adapter_id)

    def pin_adapter(self, adapter_id: int) -> bool:
        return self.manager.pin_adapter(adapter_id)

    def list_adapters(self) -> set[int]:
        """Ids of the adapters in memory."""
        return set(self.manager.list_adapters())

    def has_adapter(self, adapter_id: int) -> bool:
        """Whether the adapter is in memory."""
        return self.manager.get_adapter(adapter_id) is not None

    def remove_all_adapters(self) -> None:
        self.manager.remove_all_adapters()

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        """Register an adapter of zeros under the request's id, without reading anything. False if it is known."""
        if lora_request.lora_int_id in self.list_adapters():
            return False
        dummy = self.manager.create_dummy_lora(lora_request.lora_int_id, rank)
        dummy.name = lora_request.lora_name
        return self.manager.add_adapter(dummy)


class WorkerLoRAManager(LRUCacheWorkerLoRAManager):
    """Loads what a step needs and forgets everything else. vLLM: `WorkerLoRAManager`."""

    _manager_cls = LoRAModelManager

    def _apply_adapters(self, requests: Iterable[LoRARequest]) -> None:
        keep_only(self.manager, self._distinct(requests), self._load)

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load and activate. False if it was there already."""
        if lora_request.lora_int_id in self.list_adapters():
            return False
        self.manager.add_adapter(self._load(lora_request))
        return self.manager.activate_adapter(lora_request.lora_int_id)
