"""From a request to an adapter that fits the model.

Stands for `_load_adapter` of vllm/lora/worker_manager.py (v0.22.1).
"""

import time
from collections.abc import Callable
from typing import Any

from minivllm.errors import LONGEST_NAME, message_of, one_sentence, recoverable
from minivllm.lora.limits import MOST_TENSORS, READ_AT_ONCE
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.names import find_adapter_folder
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.weights_files import weights_bytes


class AdapterSource:
    """Where a worker manager gets adapters from: folders, which are read when they are asked for.

    A seam: others wrap one, and are given to the worker manager in its place (`read_through`). `KnownLayouts` reads
    files laid out like one before, `SharedSource` has other ranks read, too, `AdapterReader` reads beside the steps.

    manager   of the model that adapters are for
    reading   how they are read for it, see `reading_parameters`
    """

    def __init__(self, manager: LRUCacheLoRAModelManager) -> None:
        self.manager = manager
        self.reading = reading_parameters(manager)

    def check(self, lora_request: LoRARequest) -> LoRAModel:
        """The adapter without its numbers; raises what loading would raise, but for what only the numbers tell.

        NaN and Inf are not seen: the config and the header of the weights file are all that is read.
        """
        return self._load(lora_request, shapes_only=True)

    def load(self, lora_request: LoRARequest) -> LoRAModel:
        """Read an adapter and check all of it; nothing in the engine has changed when this raises.

        Of weights above `READ_AT_ONCE` bytes the shapes are checked before the numbers are read.

        FileNotFoundError: no folder, no config, no weights. ValueError: everything else. Both name the adapter, in one
        sentence.
        """
        started = time.perf_counter()
        lora = self._load(lora_request, shapes_only=False)
        lora.load_seconds = time.perf_counter() - started
        return lora

    def reading_by(self, wrap: "Callable[[AdapterSource], AdapterSource]") -> "AdapterSource":
        """This source, its files read by another that is put around the one which reads them: here around this one."""
        return wrap(self)

    def _load(self, lora_request: LoRARequest, shapes_only: bool) -> LoRAModel:
        try:
            extensions = self.manager.extensions
            folder = find_adapter_folder(lora_request.lora_path, extensions.folder_sources)
            if not shapes_only and weights_bytes(folder, extensions.files) > READ_AT_ONCE:
                self._read(lora_request, folder, shapes_only=True)
            return self._read(lora_request, folder, shapes_only)
        except BaseException as error:
            refusal = _refusal(one_sentence(lora_request.lora_name, LONGEST_NAME), error)
            self.manager.tell("refuse", lora_request.lora_int_id, reason=str(refusal))
            raise refusal from error

    def _read(self, lora_request: LoRARequest, folder: str, shapes_only: bool) -> LoRAModel:
        """As `load` and `check`, but errors do not name the adapter yet."""
        lora_config, extensions = self.manager.lora_config, self.manager.extensions
        options = self.reading | {"shapes_only": shapes_only}
        longest = getattr(getattr(self.manager.model, "config", None), "max_position_embeddings", None)
        if lora_request.lora_tensors is None:
            helper = PEFTHelper.from_local_dir(folder, longest, extensions)
            helper.validate_legal(lora_config)
            options |= {"peft_helper": helper, "lora_model_id": lora_request.lora_int_id}
            lora = LoRAModel.from_local_checkpoint(folder, **options)
        elif extensions.read_request is None:
            raise ValueError(
                "adapters in requests (lora_tensors) are not read here; give the adapter's folder"
            )
        else:
            lora = extensions.read_request(lora_request, lora_config, longest, extensions, **options)
        fit = self.manager.wrapped.judge if shapes_only else self.manager.wrapped.accept
        fit(lora)
        lora.name = lora_request.lora_name
        return lora


def reading_parameters(manager: LRUCacheLoRAModelManager) -> dict[str, Any]:
    """The parameters of `LoRAModel.from_local_checkpoint` that the model decides.

    expected_lora_modules   ends of the names that adapters may use: of modules, and of the parts of fused ones
    most_tensors            what an adapter of all modules has: A, B and a bias of each, and copies of base embeddings
    """
    model, packed = manager.model, {**manager.extensions.part_names, **manager.packed_modules_mapping}
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
    """The error in one sentence that names the adapter; `recoverable` raises again what is no fault, such as Ctrl-C."""
    # What somebody else's bytes make a library raise is in no list, and must not end the requests of others.
    if not isinstance(error, OSError | ValueError):
        return ValueError(one_sentence(f"adapter '{name}' cannot be read: {message_of(recoverable(error))}"))
    kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
    return kind(one_sentence(f"adapter '{name}': {error}"))
