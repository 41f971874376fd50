"""From a request to an adapter that fits the model. Stands for `_load_adapter` of vllm/lora/worker_manager.py
(v0.22.1)."""

import time
from typing import Any

import torch
from torch import nn

import minivllm.lora.seams as seams
from minivllm.config import LoRAConfig
from minivllm.faults import as_fault, reason
from minivllm.lora.limits import MOST_TENSORS, READ_AT_ONCE
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.names import get_adapter_absolute_path
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.sentences import LONGEST_NAME, one_sentence
from minivllm.lora.weights_files import weights_bytes


class AdapterLoader:
    """Reads adapters for the model that it wraps; the half of vLLM's `WorkerLoRAManager` that no step asks.

    vllm_config   read of it: `.lora_config`, `.model_config.get_vocab_size()`, `.scheduler_config.max_num_seqs` and
                  `.max_num_batched_tokens`
    manager       of memory and slots, once `create_lora_manager` was called
    """

    _manager_cls = LRUCacheLoRAModelManager
    manager: LRUCacheLoRAModelManager

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device | str,
        embedding_modules: dict[str, str] | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.device = device

    def create_lora_manager(self, model: nn.Module, vllm_config: object | None = None) -> nn.Module:
        """Wrap the model's layers and return the model."""
        config, scheduler = self.vllm_config, self.vllm_config.scheduler_config
        self.manager = self._adapter_manager = self._manager_cls(
            model,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            config.model_config.get_vocab_size(),
            config.lora_config,
            self.device,
        )
        return model

    def _load_adapter(self, lora_request: LoRARequest, shapes_only: bool = False) -> LoRAModel:
        """Read an adapter folder and check all of it; nothing in the engine has changed when this raises.

        Of weights above `READ_AT_ONCE` bytes the shapes are checked before the numbers are read. FileNotFoundError: no
        folder, no config, no weights. ValueError: everything else. Both name the adapter, in one sentence.

        shapes_only   from the config and the header of the weights file alone: NaN and Inf are not seen
        """
        name = one_sentence(lora_request.lora_name, LONGEST_NAME)
        try:
            return _read(self.manager, lora_request, shapes_only)
        except BaseException as error:
            refusal = _refusal(name, error)
            self.manager.tell("refuse", lora_request.lora_int_id, reason=str(refusal))
            raise refusal from error

    def check_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        """The adapter without its numbers; raises what loading would raise, but for what only the numbers tell."""
        return self._load_adapter(lora_request, shapes_only=True)

    def _timed_load(self, lora_request: LoRARequest) -> LoRAModel:
        """As `_load_adapter`; told is a "load" with its seconds."""
        started = time.perf_counter()
        lora = self._load_adapter(lora_request)
        self.manager.tell("load", lora.id, seconds=time.perf_counter() - started, name=lora_request.lora_name)
        return lora

    def _load_if_missing(self, request: LoRARequest) -> None:
        """Read an adapter into memory unless it is there; `load_inplace` is not looked at."""
        if self.manager.get_adapter(request.lora_int_id) is None:
            self.manager.add_adapter(self._timed_load(request))


def _refusal(name: str, error: BaseException) -> Exception:
    """What people are told; what is no fault (`as_fault`) is raised again."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(one_sentence(f"adapter '{name}': {error}"))
    if isinstance(error, OSError | ValueError):
        return ValueError(one_sentence(f"adapter '{name}': {error}"))
    # What somebody else's bytes make a library raise is in no list, and must not end the requests of others.
    return ValueError(one_sentence(f"adapter '{name}' cannot be read: {reason(as_fault(error))}"))


def _read(manager: LRUCacheLoRAModelManager, lora_request: LoRARequest, shapes_only: bool) -> LoRAModel:
    """As `_load_adapter`, but the errors are as the readers raise them, without the adapter's name."""
    model = manager.model
    if not shapes_only and weights_bytes(get_adapter_absolute_path(lora_request.lora_path)) > READ_AT_ONCE:
        _read(manager, lora_request, shapes_only=True)
    in_memory = lora_request.lora_tensors is not None
    read = seams.request_readers["lora_tensors"] if in_memory else _read_folder
    lora = read(
        lora_request,
        manager.lora_config,
        getattr(getattr(model, "config", None), "max_position_embeddings", None),
        _expected_modules(manager),
        shapes_only,
        _most_tensors(manager),
        dtype=manager.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=getattr(model, "hf_to_vllm_mapper", None),
        skip_prefixes=getattr(model, "lora_skip_prefixes", None),
    )
    manager.check_adapter(lora)
    lora.name = lora_request.lora_name
    return lora


def _read_folder(
    lora_request: LoRARequest,
    lora_config: LoRAConfig,
    max_position_embeddings: int | None,
    expected_lora_modules: list[str],
    shapes_only: bool,
    most_tensors: int,
    **options: Any,
) -> LoRAModel:
    """The adapter in a request's folder.   options: see `LoRAModel.from_local_checkpoint`"""
    folder = get_adapter_absolute_path(lora_request.lora_path)
    peft_helper = PEFTHelper.from_local_dir(folder, max_position_embeddings)
    peft_helper.validate_legal(lora_config)
    return LoRAModel.from_local_checkpoint(
        folder,
        expected_lora_modules,
        peft_helper,
        lora_model_id=lora_request.lora_int_id,
        shapes_only=shapes_only,
        most_tensors=most_tensors,
        **options,
    )


def _most_tensors(manager: LRUCacheLoRAModelManager) -> int:
    """More tensors than an adapter of all modules has: A, B and a bias for each, and copies of base embeddings."""
    if getattr(manager.model, "lora_skip_prefixes", None):
        return MOST_TENSORS
    return min(MOST_TENSORS, 4 * len(manager.wrapped.targets) + 16)


def _expected_modules(manager: LRUCacheLoRAModelManager) -> list[str]:
    """The ends of module names an adapter may use: those of modules, and of the parts of fused ones."""
    packed = {**seams.part_names, **manager.packed_modules_mapping}
    return [name for module in manager.supported_lora_modules for name in (*packed.get(module, []), module)]
