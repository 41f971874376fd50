"""From a request to an adapter that fits the model.

Stands for `_load_adapter` of vllm/lora/worker_manager.py (v0.22.1).
"""

import hashlib
import os
import time
from collections.abc import Collection, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from minivllm.errors import LONGEST_NAME, message_of, one_sentence, recoverable
from minivllm.lora.limits import MOST_TENSORS
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.names import find_adapter_folder, get_adapter_absolute_path, is_left_out
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.plans import AdapterPlan
from minivllm.lora.request import LoRARequest
from minivllm.lora.weights_files import (
    files_in,
    find_safetensors,
    find_weights_file,
    read_header,
    read_weights,
    reading,
)

# Tensors of all plans that are kept. Each takes 0.8 KB, and an adapter of all linears of an 8B model has 448.
MOST_KEPT = 30_000


class AdapterSource:
    """Where a worker manager gets adapters from: folders, which are read when they are asked for.

    Of each a plan is made, from the config and the weights file's header, which the model judges before any number is
    read. The plan is kept, so that of the next adapter of the same layout nothing but the numbers has to be read.

    A seam: others wrap one, and are given to the worker manager in its place (`read_through`). `SharedSource` has other
    ranks read, too, `AdapterReader` reads beside the steps. Any thread may read.

    manager   of the model that adapters are for
    reading   the parameters of `LoRAModel.from_lora_tensors` that the model decides
    most_tensors   that an adapter of all its modules has: A, B and a bias of each, and copies of base embeddings
    files_beside   names of all files that options add to an adapter's folder
    loading   ids of the adapters that are read beside the steps: none here
    """

    loading: Collection[int] = ()

    def __init__(self, manager: LRUCacheLoRAModelManager) -> None:
        self.manager = manager
        self.reading = {
            "dtype": manager.lora_dtype,
            "model_vocab_size": manager.vocab_size,
            "weights_mapper": getattr(manager.model, "hf_to_vllm_mapper", None),
            "skip_prefixes": getattr(manager.model, "lora_skip_prefixes", None),
        }
        tensors = MOST_TENSORS if self.reading["skip_prefixes"] else 4 * len(manager.wrapped.claims) + 16
        self.most_tensors = min(MOST_TENSORS, tensors)
        self.files_beside = [name for option in manager.extensions.options for name in option.files]
        self._plans: dict[Hashable, AdapterPlan] = {}  # the one used longest ago is the first
        self._lock = Lock()

    def check(self, lora_request: LoRARequest) -> LoRAModel:
        """The adapter without its numbers; raises what loading would raise, but for what only the numbers tell.

        NaN and Inf are not seen: the config and the header of the weights file are all that is read.
        """
        return self._load(lora_request, shapes_only=True)

    def load(self, lora_request: LoRARequest) -> LoRAModel:
        """Read an adapter and check all of it; nothing in the engine has changed when this raises.

        FileNotFoundError: no folder, no config, no weights. ValueError: everything else. Both name the adapter, in one
        sentence.
        """
        started = time.perf_counter()
        lora = self._load(lora_request, shapes_only=False)
        lora.load_seconds = time.perf_counter() - started
        return lora

    def resolve(self, lora_request: LoRARequest) -> LoRARequest:
        """The request as steps load it: with no order to reload, and with the real folder that its path leads to now.

        A step may load it long after. Then it neither waits for a network nor reads another version, because a link or
        a hub's branch leads there by now.
        """
        path = lora_request.lora_path
        if (folder := real_folder(path)) is None:
            found = get_adapter_absolute_path(path, self.manager.extensions.folder_sources)
            folder = real_folder(found) or found
        is_same = folder == path and not lora_request.load_inplace
        return lora_request if is_same else replace(lora_request, lora_path=folder, load_inplace=False)

    def read_ahead(self, lora_request: LoRARequest) -> str | None:
        """Begin to read the adapter of a waiting request, in a source that can read beside steps.

        Returns why the request has to wait for it; None where the adapter is there, or is read by the step that admits
        the request, as here.
        """
        return None

    def _load(self, lora_request: LoRARequest, shapes_only: bool) -> LoRAModel:
        try:
            folder = find_adapter_folder(lora_request.lora_path, self.manager.extensions.folder_sources)
            read = self._read_parts if lora_request.is_made_of_others else self._read
            lora = read(lora_request, folder, shapes_only)
        except BaseException as error:
            refusal = _refusal(one_sentence(lora_request.lora_name, LONGEST_NAME), error)
            self.manager.tell("refuse", lora_request.lora_int_id, reason=str(refusal))
            raise refusal from error
        lora.name = lora_request.lora_name
        return lora

    def _read_parts(self, lora_request: LoRARequest, folder: str, shapes_only: bool) -> LoRAModel:
        """As `_read`, an adapter that is made of others, in a source that can make one."""
        raise ValueError("it is made of other adapters, and nothing here makes one")

    def _read(self, lora_request: LoRARequest, folder: str, shapes_only: bool) -> LoRAModel:
        """As `load` and `check`, but errors do not name the adapter yet."""
        wrapped, extensions = self.manager.wrapped, self.manager.extensions
        longest = getattr(getattr(self.manager.model, "config", None), "max_position_embeddings", None)
        if lora_request.lora_tensors is not None:
            lora = self._from_request(lora_request, longest, shapes_only)
            (wrapped.judge if shapes_only else wrapped.accept)(lora)
            return lora
        helper = PEFTHelper.from_local_dir(folder, longest, extensions)
        helper.validate_legal(self.manager.lora_config)
        path, adapter_id = find_weights_file(folder), lora_request.lora_int_id
        has_plan = path.suffix == ".safetensors" and not files_in(folder, self.files_beside)
        if has_plan:
            with reading(path) as file:
                plan = self._plan_of(path, file, helper, shapes_only)
                if shapes_only:
                    return plan.judged.clone(adapter_id)
                filled = plan.fill(file, adapter_id, self.manager.lora_dtype, self.manager.slot_writer)
            if filled is not None:
                return filled
        load = partial(
            LoRAModel.from_local_checkpoint,
            folder,
            None,
            helper,
            lora_model_id=adapter_id,
            most_tensors=self.most_tensors,
            **self.reading,
        )
        if path.suffix != ".safetensors":  # such a file is read as a whole, so once
            formats = extensions.file_formats
            load = partial(load, tensors=read_weights(path, most_tensors=self.most_tensors, formats=formats))
        if not has_plan:  # else its shapes have been judged
            wrapped.judge(lora := load(shapes_only=True))
            if shapes_only:
                return lora
        wrapped.accept(lora := load())
        return lora

    def _plan_of(self, path: Path, file: BinaryIO, helper: PEFTHelper, shapes_only: bool) -> AdapterPlan:
        """The plan for a file. ValueError for what cannot be read or does not fit the model."""
        header, size = read_header(path, file)
        key = hashlib.sha256(header).digest(), size, helper.key
        with self._lock:
            plan = self._plans.pop(key, None)
        if plan is None:
            stored = find_safetensors(path, header, size, self.most_tensors)
            left_out = partial(is_left_out, skip_prefixes=self.reading["skip_prefixes"])
            shapes = {name: tensor.meta for name, tensor in stored.items() if not left_out(name)}
            try:
                judged = LoRAModel.from_lora_tensors(1, shapes, helper, "meta", **self.reading)
            except ValueError as error:
                raise ValueError(f"'{path}': {error}") from error
            starts = sorted((stored[name].start, name) for name in shapes)
            start = starts[0][0] if len(shapes) == len(stored) else None
            plan = AdapterPlan(judged, [shapes[name] for _, name in starts], start, self.manager.wrapped)
            if shapes_only or plan.packed is None:  # what is packed has been judged
                self.manager.wrapped.judge(judged)
        with self._lock:
            self._plans[key] = plan
            while sum(len(kept.in_order) for kept in self._plans.values()) > MOST_KEPT:
                del self._plans[next(iter(self._plans))]
        return plan

    def _from_request(self, lora_request: LoRARequest, longest: int | None, shapes_only: bool) -> LoRAModel:
        """An adapter whose tensors the request brings."""
        extensions = self.manager.extensions
        if extensions.read_request is None:
            raise ValueError(
                "adapters in requests (lora_tensors) are not read here; give the adapter's folder"
            )
        options = {"shapes_only": shapes_only, "most_tensors": self.most_tensors, **self.reading}
        return extensions.read_request(lora_request, self.manager.lora_config, longest, extensions, **options)


def _refusal(name: str, error: BaseException) -> Exception:
    """The error in one sentence that names the adapter; `recoverable` raises again what is no fault, such as Ctrl-C."""
    # What somebody else's bytes make a library raise is in no list, and must not end the requests of others.
    if not isinstance(error, OSError | ValueError):
        return ValueError(one_sentence(f"adapter '{name}' cannot be read: {message_of(recoverable(error))}"))
    kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
    return kind(one_sentence(f"adapter '{name}': {error}"))


def real_folder(path: str) -> str | None:
    """The absolute path, free of links, of what a path leads to now. None if there is nothing."""
    path = os.path.expanduser(path)
    return os.path.realpath(path) if os.path.exists(path) else None
