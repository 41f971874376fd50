"""From requests to adapters in slots. Stands for vllm/lora/worker_manager.py (v0.22.1)."""

import time
from collections.abc import Iterable

import torch
from torch import nn

from minivllm.faults import as_fault, put_down_to, reason
from minivllm.lora.layers import LoRAMapping
from minivllm.lora.limits import MOST_TENSORS, READ_AT_ONCE
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager, create_lora_manager
from minivllm.lora.names import EXPERT_PARTS, EXPERTS, get_adapter_absolute_path
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.sentences import LONGEST_NAME, one_sentence
from minivllm.lora.weights_files import weights_bytes


class WorkerLoRAManager:
    """Loads what a step needs and forgets everything else. vLLM: `WorkerLoRAManager`.

    vllm_config         read of it: `.lora_config`, `.model_config.get_vocab_size()`,
                        `.scheduler_config.max_num_seqs` and `.max_num_batched_tokens`
    embedding_modules   the model's, for dummy adapters
    """

    _manager_cls: type[LoRAModelManager] = LoRAModelManager
    _adapter_manager: LoRAModelManager  # made by create_lora_manager

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

    def create_lora_manager(self, model: nn.Module, vllm_config: object | None = None) -> nn.Module:
        """Wrap the model's layers and return the model."""
        self._adapter_manager = create_lora_manager(
            model,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.vocab_size,
            self.lora_config,
            vllm_config,
            self.device,
            self._manager_cls,
        )
        return self._adapter_manager.model

    @property
    def manager(self) -> LoRAModelManager:
        """The manager of memory and slots under this one."""
        return self._adapter_manager

    def _load_adapter(self, lora_request: LoRARequest, shapes_only: bool = False) -> LoRAModel:
        """Read an adapter folder and check all of it; nothing in the engine has changed when this raises.

        Of weights above `READ_AT_ONCE` bytes the shapes are checked before the numbers are read. FileNotFoundError: no
        folder, no config, no weights. ValueError: everything else. Both name the adapter, in one sentence.
        """
        name = one_sentence(lora_request.lora_name, LONGEST_NAME)
        try:
            return self._read_adapter(lora_request, shapes_only)
        except FileNotFoundError as error:
            raise FileNotFoundError(one_sentence(f"adapter '{name}': {error}")) from error
        except (OSError, ValueError) as error:
            raise ValueError(one_sentence(f"adapter '{name}': {error}")) from error
        # What somebody else's bytes make a library raise is in no list, and must not end the requests of others.
        except BaseException as error:
            raise ValueError(
                one_sentence(f"adapter '{name}' cannot be read: {reason(as_fault(error))}")
            ) from error

    def _read_adapter(self, lora_request: LoRARequest, shapes_only: bool) -> LoRAModel:
        """As `_load_adapter`, but the errors are as the readers raise them, without the adapter's name."""
        manager = self._adapter_manager
        folder = get_adapter_absolute_path(lora_request.lora_path)
        if not shapes_only and weights_bytes(folder) > READ_AT_ONCE:
            self._read_adapter(lora_request, shapes_only=True)
        positions = getattr(getattr(manager.model, "config", None), "max_position_embeddings", None)
        peft_helper = PEFTHelper.from_local_dir(folder, positions)
        peft_helper.validate_legal(self.lora_config)
        lora = LoRAModel.from_local_checkpoint(
            folder,
            self._expected_modules(),
            peft_helper,
            lora_model_id=lora_request.lora_int_id,
            dtype=manager.lora_dtype,
            model_vocab_size=self.vocab_size,
            weights_mapper=getattr(manager.model, "hf_to_vllm_mapper", None),
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
            shapes_only=shapes_only,
            most_tensors=self._most_tensors(),
        )
        manager.check_adapter(lora)
        lora.name = lora_request.lora_name
        if (factor := peft_helper.vllm_long_context_scaling_factor) != 1:
            lora.beside["scaling_factor"] = factor
        return lora

    def _most_tensors(self) -> int:
        """More tensors than an adapter of all modules has: A, B and a bias for each, and copies of base embeddings."""
        if getattr(self._adapter_manager.model, "lora_skip_prefixes", None):
            return MOST_TENSORS
        return min(MOST_TENSORS, 4 * len(self._adapter_manager.wrapped.targets) + 16)

    def _expected_modules(self) -> list[str]:
        """The ends of module names an adapter may use: those of modules, and of the parts of fused ones."""
        packed = self._adapter_manager.packed_modules_mapping
        supported = self._adapter_manager.supported_lora_modules
        packed = {EXPERTS: EXPERT_PARTS, **packed}
        return [name for module in supported for name in (*packed.get(module, []), module)]

    def check_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        """The adapter without its numbers, from the config and the header of the weights file alone.

        Raises what loading would raise, but for what only the numbers tell: NaN or Inf.
        """
        return self._load_adapter(lora_request, shapes_only=True)

    def _timed_load(self, lora_request: LoRARequest) -> LoRAModel:
        started = time.perf_counter()
        lora = self._load_adapter(lora_request)
        self._adapter_manager.stats.count_load(lora.id, time.perf_counter() - started)
        return lora

    def set_active_adapters(self, requests: Iterable[LoRARequest], mapping: LoRAMapping | None) -> None:
        """Bring every requested adapter into a slot, *then* translate the batch's ids to slots.

        RuntimeError, and nothing has changed, when they and the pinned ones are more than the slots. Errors of
        loading pass through, put down to their adapter (`adapter_at_fault`).
        """
        requests = list(requests)
        try:
            self._apply_adapters(requests)
        except BaseException as error:
            # Adapters come into slots in the order of ids. So the first that is in no slot has raised it.
            active = self._adapter_manager.list_active_adapters()
            not_in_slots = {request.lora_int_id for request in requests if request} - active.keys()
            put_down_to(error, min(not_in_slots, default=0))
            raise
        if mapping is not None:
            self._adapter_manager.set_adapter_mapping(mapping)

    def _apply_adapters(self, requests: Iterable[LoRARequest]) -> None:
        """Load first, forget second: a bad adapter costs no good one its place."""
        wanted = self._distinct(requests)
        missing = wanted.keys() - self.list_adapters()
        loaded = [self._timed_load(wanted[adapter_id]) for adapter_id in missing]
        for adapter_id in self.list_adapters() - wanted.keys():
            self.remove_adapter(adapter_id)
        for lora in loaded:
            self._adapter_manager.add_adapter(lora)
        # vLLM goes through a set, too, and its tests know the order: adapters 6, 7, 8 get slots 1, 2, 0.
        for adapter_id in set(wanted):
            self._adapter_manager.activate_adapter(adapter_id)

    def _distinct(self, requests: Iterable[LoRARequest]) -> dict[int, LoRARequest]:
        """One request for each adapter by id, in the order of ids: sets have none of their own."""
        wanted = {request.lora_int_id: request for request in requests if request is not None}
        pinned = self._adapter_manager.pinned_adapters - wanted.keys()
        slots = self._adapter_manager.lora_slots
        if len(wanted) + len(pinned) > slots:
            also = f" plus {len(pinned)} pinned" if pinned else ""
            raise RuntimeError(
                f"Number of requested LoRAs ({len(wanted)}{also}) is greater than the number of GPU LoRA slots "
                f"({slots})."
            )
        return dict(sorted(wanted.items()))

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load and activate. False if it was there already."""
        if lora_request.lora_int_id in self.list_adapters():
            return False
        self._adapter_manager.add_adapter(self._timed_load(lora_request))
        return self._adapter_manager.activate_adapter(lora_request.lora_int_id)

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        """Register an adapter of zeros under the request's id, without reading anything. False if it is known."""
        if lora_request.lora_int_id in self.list_adapters():
            return False
        dummy = self._adapter_manager.create_dummy_lora(
            lora_request.lora_int_id, rank, self.embedding_modules
        )
        dummy.name = lora_request.lora_name
        return self._adapter_manager.add_adapter(dummy)

    def remove_adapter(self, adapter_id: int) -> bool:
        return self._adapter_manager.remove_adapter(adapter_id)

    def remove_all_adapters(self) -> None:
        self._adapter_manager.remove_all_adapters()

    def pin_adapter(self, adapter_id: int) -> bool:
        return self._adapter_manager.pin_adapter(adapter_id)

    def list_adapters(self) -> set[int]:
        """Ids of the adapters in memory."""
        return set(self._adapter_manager.list_adapters())


class LRUCacheWorkerLoRAManager(WorkerLoRAManager):
    """Loads what a step needs and keeps the rest until there is no room. vLLM: the same name."""

    _manager_cls = LRUCacheLoRAModelManager
    _adapter_manager: LRUCacheLoRAModelManager

    def _load_if_missing(self, request: LoRARequest) -> None:
        """Read an adapter into memory unless it is there; `load_inplace` is not looked at."""
        if self._adapter_manager.get_adapter(request.lora_int_id) is None:
            self._adapter_manager.add_adapter(self._timed_load(request))

    # region lab 5.7: load on demand, and spare what the step needs
    def _apply_adapters(self, requests: Iterable[LoRARequest]) -> None:
        """Bring a step's adapters into memory and slots. The stats count a hit for each that had a slot already."""
        manager = self._adapter_manager
        for adapter_id, request in self._claim(requests).items():
            self._load_if_missing(request)
            activated = manager.activate_adapter(adapter_id)
            manager.stats.count_use(adapter_id, hit=not activated)

    def _claim(self, requests: Iterable[LoRARequest]) -> dict[int, LoRARequest]:
        """The step's adapters by id, as `_distinct` has them, none of which may be evicted from here on.

        With slots [1, 2, 3] and a step that wants 4, 1 and 5, loading 4 would else evict 1, only for 1 to be
        copied in again. The manager evicts nobody of its `in_use`, which a step that is refused leaves as it was.
        """
        wanted = self._distinct(requests)
        self._adapter_manager.in_use = frozenset(wanted)
        return wanted

    def prepare_adapters(self, requests: Iterable[LoRARequest]) -> dict[int, BaseException]:
        """Read into memory what a step needs and is not there, all that can be read.

        Returns adapter id -> the error that kept it out, of whatever kind. What is no fault (`as_fault`) is raised.
        """
        failures: dict[int, BaseException] = {}
        for adapter_id, request in self._claim(requests).items():
            try:
                self._load_if_missing(request)
            except BaseException as error:
                failures[adapter_id] = as_fault(error)
        return failures

    # endregion

    # region lab 5.8: load when somebody asks for it
    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Load, or with `load_inplace` load again, and activate if a slot can be had. True if it was read.

        Asking counts as use. Loading comes first: a bad adapter evicts nothing, and a failed reload leaves the old
        weights serving. RuntimeError when memory is full of adapters that are pinned or in use. Without a slot to
        be had (`has_room_for`) it waits in memory for the step that needs it.
        """
        manager = self._adapter_manager
        adapter_id = lora_request.lora_int_id
        known = manager.get_adapter(adapter_id) is not None
        if known and lora_request.load_inplace:
            manager.replace_adapter(self._timed_load(lora_request))
        else:
            self._load_if_missing(lora_request)
        manager.touch_adapter(adapter_id)
        if manager.has_room_for(adapter_id):
            manager.activate_adapter(adapter_id)
        return lora_request.load_inplace or not known

    # endregion

    def unpin_adapter(self, adapter_id: int) -> bool:
        """Let an adapter be evicted again. False if it was not pinned."""
        return self._adapter_manager.unpin_adapter(adapter_id)
