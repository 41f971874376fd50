"""From a request to an adapter that fits the model. Stands for `_load_adapter` of vllm/lora/worker_manager.py
(v0.22.1)."""

import time
from typing import Any

import torch
from torch import nn

import minivllm.lora.seams as seams
from minivllm.faults import as_fault, reason
from minivllm.lora.limits import MOST_TENSORS, READ_AT_ONCE
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.names import find_adapter_folder
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.weights_files import weights_bytes
from minivllm.sentences import LONGEST_NAME, one_sentence


class AdapterLoader:
    """Reads adapters for the model that it wraps; the half of vLLM's `WorkerLoRAManager` that no step asks.

    vllm_config   read of it: `.lora_config`, `.model_config.get_vocab_size()`, `.scheduler_config.max_num_seqs` and
                  `.max_num_batched_tokens`
    manager       of memory and slots, once `create_lora_manager` was called
    reading       how adapters are read for its model, see `reading_parameters`; likewise
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
        self.reading = reading_parameters(self.manager)
        return model

    def _load_adapter(self, lora_request: LoRARequest, shapes_only: bool = False) -> LoRAModel:
        """Read an adapter folder and check all of it; nothing in the engine has changed when this raises.

        Of weights above `READ_AT_ONCE` bytes the shapes are checked before the numbers are read.

        FileNotFoundError: no folder, no config, no weights. ValueError: everything else. Both name the adapter, in one
        sentence.

        shapes_only   from the config and the header of the weights file alone: NaN and Inf are not seen
        """
        try:
            folder = find_adapter_folder(lora_request.lora_path)
            if not shapes_only and weights_bytes(folder) > READ_AT_ONCE:
                self._read(lora_request, folder, shapes_only=True)
            return self._read(lora_request, folder, shapes_only)
        except BaseException as error:
            refusal = _refusal(one_sentence(lora_request.lora_name, LONGEST_NAME), error)
            self.manager.tell("refuse", lora_request.lora_int_id, reason=str(refusal))
            raise refusal from error

    def check_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        """The adapter without its numbers; raises what loading would raise, but for what only the numbers tell."""
        return self._load_adapter(lora_request, shapes_only=True)

    def _read(self, lora_request: LoRARequest, folder: str, shapes_only: bool) -> LoRAModel:
        """As `_load_adapter`, but errors do not name the adapter yet."""
        lora_config = self.manager.lora_config
        options = self.reading | {"shapes_only": shapes_only}
        longest = getattr(getattr(self.manager.model, "config", None), "max_position_embeddings", None)
        if lora_request.lora_tensors is None:
            helper = PEFTHelper.from_local_dir(folder, longest)
            helper.validate_legal(lora_config)
            options |= {"peft_helper": helper, "lora_model_id": lora_request.lora_int_id}
            lora = LoRAModel.from_local_checkpoint(folder, **options)
        else:
            lora = seams.request_readers["lora_tensors"](lora_request, lora_config, longest, **options)
        fit = self.manager.wrapped.judge if shapes_only else self.manager.wrapped.accept
        fit(lora)
        lora.name = lora_request.lora_name
        return lora

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


def reading_parameters(manager: LRUCacheLoRAModelManager) -> dict[str, Any]:
    """The parameters of `LoRAModel.from_local_checkpoint` that the model decides.

    expected_lora_modules   ends of the names that adapters may use: of modules, and of the parts of fused ones
    most_tensors            what an adapter of all modules has: A, B and a bias of each, and copies of base embeddings
    """
    model, packed = manager.model, {**seams.part_names, **manager.packed_modules_mapping}
    skip_prefixes = getattr(model, "lora_skip_prefixes", None)
    tensors = MOST_TENSORS if skip_prefixes else 4 * len(manager.wrapped.claims) + 16
    return {
        "expected_lora_modules": [
            name for module in manager.supported_lora_modules for name in (*packed.get(module, []), module)
        ],
        "most_tensors": min(MOST_TENSORS, tensors),
        "dtype": manager.lora_dtype,
        "model_vocab_size": manager.vocab_size,
        "weights_mapper": getattr(model, "hf_to_vllm_mapper", None),
        "skip_prefixes": skip_prefixes,
    }


def _refusal(name: str, error: BaseException) -> Exception:
    """The error in one sentence that names the adapter; `as_fault` raises again what is no fault, such as Ctrl-C."""
    # What somebody else's bytes make a library raise is in no list, and must not end the requests of others.
    if not isinstance(error, OSError | ValueError):
        return ValueError(one_sentence(f"adapter '{name}' cannot be read: {reason(as_fault(error))}"))
    kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
    return kind(one_sentence(f"adapter '{name}': {error}"))
