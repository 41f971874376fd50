"""Everything that keeps the engine from serving an adapter, not only what it stumbles over first."""

import contextlib
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from minivllm.assembly import parts_of
from minivllm.config import EngineConfig, LoRAConfig, ModelConfig
from minivllm.errors import message_of, one_sentence, recoverable
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import PEFT_PREFIX, find_adapter_folder
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.weights_files import files_in, find_weights_file, read_weights
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.registry import MODELS
from minivllm.options.legacy.new_embeddings import FILES, check_new_embeddings, put_beside

# Of larger files the shapes are checked first.
READ_AT_ONCE = 81 * 2**20


@dataclass
class AdapterOnDisk:
    """What is in an adapter's folder, as far as it can be read.

    file             the weights; `tensors` is what they hold
    new_embeddings   of the tokens that it adds
    loras            the modules whose tensors are sound, by name
    problems         sentences, each with the thing, the value and what to do
    """

    folder: str
    helper: PEFTHelper | None = None
    file: Path | None = None
    tensors: dict[str, torch.Tensor] | None = None
    new_embeddings: dict[str, torch.Tensor] = field(default_factory=dict)
    loras: dict[str, LoRALayerWeights] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def added_tokens(self) -> int:
        return max(map(len, self.new_embeddings.values()), default=0)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Whatever is refused within becomes one of the problems."""
        try:
            yield
        except BaseException as error:
            self.problems.append(one_sentence(message_of(recoverable(error))))


def check_adapter(path: str, model: str, lora_config: LoRAConfig) -> AdapterOnDisk:
    """Read an adapter and look for all that is wrong with it; `problems` is empty if the engine would serve it.

    The model is built without its weights: shapes are all that is needed. FileNotFoundError and ValueError are
    about the model.
    """
    config = EngineConfig(ModelConfig(model), lora_config=lora_config)
    adapter = _read(path, config)
    if adapter.added_tokens > lora_config.lora_extra_vocab_size:
        adapter.problems += _misfits(_manager(config), adapter, {}, adapter.new_embeddings)
    if adapter.helper and adapter.tensors is not None and (admitting := _admitting(adapter, config)):
        _look_into_weights(adapter, _manager(admitting))
        if not adapter.problems and any(tensor.is_meta for tensor in adapter.tensors.values()):
            with adapter.noting():
                adapter.tensors = read_weights(adapter.file, formats=parts_of(config).lora.file_formats)
            _look_into_weights(adapter, _manager(admitting))
    if not adapter.problems:  # the engine has the last word, and sees the adapter as a whole
        with adapter.noting():
            _manager(config).source.check(LoRARequest(path, 1, adapter.folder))
    return adapter


def _read(path: str, config: EngineConfig) -> AdapterOnDisk:
    adapter, extensions = AdapterOnDisk(path), parts_of(config).lora
    with adapter.noting():
        adapter.folder = find_adapter_folder(path, extensions.folder_sources)
    if adapter.problems:
        return adapter
    positions = config.model_config.architecture.max_position_embeddings
    with adapter.noting():
        adapter.helper = PEFTHelper.from_local_dir(adapter.folder, positions, extensions)
        adapter.helper.validate_legal(config.lora_config)
    formats = extensions.file_formats
    if not os.path.isdir(adapter.folder):
        return adapter
    with warnings.catch_warnings(action="ignore"):  # what torch thinks of a pickle, the refusal says
        with adapter.noting():
            adapter.file = find_weights_file(adapter.folder)
            # Of a large file the shapes come first: its numbers are read if they are of use.
            is_large = adapter.file.stat().st_size > READ_AT_ONCE
            adapter.tensors = read_weights(adapter.file, is_large, formats=formats)
        with adapter.noting():
            for file in files_in(adapter.folder, FILES)[:1]:
                check_new_embeddings(str(file), found := read_weights(file, formats=formats))
                adapter.new_embeddings = found
    return adapter


def _admitting(adapter: AdapterOnDisk, config: EngineConfig) -> EngineConfig | None:
    """The config with every option so that the adapter's config is served. None if there are no such options: then
    its tensors are what they are because of that, and there is no more to say."""
    given, helper = config.lora_config, adapter.helper
    factors = {*(given.long_lora_scaling_factors or ()), helper.beside.get("scaling_factor", 1.0)} - {1.0}
    lora_config = replace(
        given,
        max_lora_rank=max(given.max_lora_rank, helper.ranks[-1]),
        bias_enabled=True,
        lora_extra_vocab_size=max(given.lora_extra_vocab_size, adapter.added_tokens),
        long_lora_scaling_factors=factors or None,
    )
    try:
        helper.validate_legal(lora_config)
    except ValueError:
        return None
    return replace(config, lora_config=lora_config)


def _manager(config: EngineConfig) -> LRUCacheWorkerLoRAManager:
    architecture = config.model_config.architecture
    manager = LRUCacheWorkerLoRAManager(config, "cpu", extensions=parts_of(config).lora)
    manager.create_lora_manager(MODELS[architecture.architecture](architecture, torch.float32, "meta"))
    return manager


def _look_into_weights(adapter: AdapterOnDisk, manager: LRUCacheWorkerLoRAManager) -> None:
    """Note what is wrong with tensors, module by module, and then with modules, layer by layer."""
    model, dtype = manager.manager.model, manager.manager.lora_dtype
    options = {
        "dtype": dtype,
        "model_vocab_size": None if adapter.added_tokens else manager.manager.vocab_size,
        "weights_mapper": getattr(model, "hf_to_vllm_mapper", None),
        "skip_prefixes": getattr(model, "lora_skip_prefixes", None),
    }

    def load(tensors: dict[str, torch.Tensor]) -> str | None:
        try:
            adapter.loras.update(LoRAModel.from_lora_tensors(1, tensors, adapter.helper, **options).loras)
        except ValueError as error:
            return str(error)

    nothing = load({})  # what is said where there are no weights: also of a module that is passed over
    refusals = [load(tensors) for tensors in _by_module(adapter.tensors)]
    found = [text for text in refusals if text not in (None, nothing)]
    shapes = {kind: tensor.to("meta") for kind, tensor in adapter.new_embeddings.items()}
    of_tokens = _misfits(manager, adapter, {}, shapes)
    for loras in _by_layer(manager, adapter.loras):
        found += [text for text in _misfits(manager, adapter, loras, shapes) if text not in of_tokens]
    adapter.problems += fold(found)
    with adapter.noting():
        if adapter.new_embeddings:
            put_beside(added := LoRAModel(1, 1, {}), adapter.new_embeddings, "cpu", dtype)
            adapter.problems += _misfits(manager, adapter, {}, added.beside["new_embeddings"])


def _by_module(tensors: dict[str, torch.Tensor]) -> Iterable[dict[str, torch.Tensor]]:
    """The tensors of one module together, with PEFT's prefix and without it."""
    groups: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module = re.split(r"\.(?:lora_|base_layer)", name.removeprefix(PEFT_PREFIX))[0]
        groups[module][name] = tensor
    return groups.values()


def _by_layer(
    manager: LRUCacheWorkerLoRAManager, loras: dict[str, LoRALayerWeights]
) -> Iterable[dict[str, LoRALayerWeights]]:
    """The adapters of one wrapped layer together; those for none all in one."""
    wrapped = manager.manager.wrapped
    groups: dict[str | None, dict[str, LoRALayerWeights]] = defaultdict(dict)
    for name, weights in loras.items():
        groups[wrapped.claims.get(name)][name] = weights
    return groups.values()


def _misfits(
    manager: LRUCacheWorkerLoRAManager,
    adapter: AdapterOnDisk,
    loras: dict[str, LoRALayerWeights],
    new_embeddings: dict[str, torch.Tensor],
) -> list[str]:
    """Why a part of the adapter does not fit the model, [] if it does."""
    lora = LoRAModel(1, 1, dict(loras))
    if new_embeddings:
        lora.beside = {"added_tokens": adapter.added_tokens, "new_embeddings": new_embeddings}
    try:
        manager.manager.wrapped.judge(lora)
    except ValueError as error:
        return [str(error)]
    return []


def fold(problems: list[str]) -> list[str]:
    """What is wrong in the same way in many layers is said once, of the first of them."""
    alike: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        alike[re.sub(r"\.\d+\.", ".#.", problem)].append(problem)
    return [group[0] + _and_more(len(group) - 1) for group in alike.values()]


def _and_more(count: int) -> str:
    return f" (and so in {count} more layer{'s' if count > 1 else ''})" if count else ""
