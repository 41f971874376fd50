"""Everything that keeps an engine from serving an adapter, not only what a request of it is refused for.

Nothing is checked here: the functions that a request's adapter goes through are asked about one module, and one layer,
after the other, and what each of them raises is noted. vLLM (v0.22.1) says what it stumbles over first.
"""

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from minivllm.config import LoRAConfig
from minivllm.errors import message_of, one_sentence, recoverable
from minivllm.lora.checks import NeedsOption
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel, read_option_files
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import PEFT_PREFIX, find_adapter_folder, is_left_out
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest
from minivllm.lora.weights_files import find_weights_file, read_weights

# Of larger files the shapes are judged first, and the numbers are read if nothing is wrong with these.
READ_AT_ONCE = 81 * 2**20


@dataclass
class JudgedAdapter:
    """What is in an adapter's folder, as far as it can be read.

    file       the weights; `tensors` is what they hold
    loras      the modules whose tensors are sound, by name
    problems   sentences, each with the thing, the value and what to do; [] if the engine would serve the adapter
    """

    folder: str
    helper: PEFTHelper | None = None
    file: Path | None = None
    tensors: dict[str, torch.Tensor] | None = None
    loras: dict[str, LoRALayerWeights] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Whatever is refused within becomes one of the problems."""
        try:
            yield
        except BaseException as error:
            self.problems.append(one_sentence(message_of(recoverable(error))))


def judge_adapter(
    path: str, lora_config: LoRAConfig, make_source: Callable[[LoRAConfig], AdapterSource]
) -> JudgedAdapter:
    """Read an adapter and look for all that is wrong with it.

    make_source   gives the source of adapters of an engine with that configuration, whose model may be shapes only

    An adapter that needs an option of the engine (`NeedsOption`) is judged on as if the engine had it.
    """
    adapter, source = JudgedAdapter(path), make_source(lora_config)
    with warnings.catch_warnings(action="ignore"):  # what torch thinks of a pickle, the refusal says
        with adapter.noting():
            adapter.folder = find_adapter_folder(path, source.manager.extensions.folder_sources)
        if adapter.problems:
            return adapter
        options = _judge_config(adapter, source)
        if not os.path.isdir(adapter.folder):
            return adapter
        is_large = False
        with adapter.noting():
            adapter.file = find_weights_file(adapter.folder)
            is_large = adapter.file.stat().st_size > READ_AT_ONCE
            _read(adapter, source, shapes_only=is_large)
        if adapter.tensors is not None and options is not None:
            admitting = make_source(replace(lora_config, **options)) if options else source
            _judge_weights(adapter, admitting, make_source, shapes_only=is_large)
            if is_large and not adapter.problems:
                _read(adapter, source, shapes_only=False)
                _judge_weights(adapter, admitting, make_source, shapes_only=False)
        if not adapter.problems:  # a request has the last word, and sees the adapter as a whole
            with adapter.noting():
                source.check(LoRARequest(path, 1, adapter.folder))
    return adapter


def _judge_config(adapter: JudgedAdapter, source: AdapterSource) -> dict[str, object] | None:
    """Read and judge the config. Gives the options that admit it, {} if it needs none; None if there are none."""
    manager = source.manager
    longest = manager.model.config.max_position_embeddings
    with adapter.noting():
        adapter.helper = PEFTHelper.from_local_dir(adapter.folder, longest, manager.extensions)
    if adapter.helper is None:
        return None
    try:
        adapter.helper.validate_legal(manager.lora_config)
    except ValueError as error:
        adapter.problems.append(one_sentence(str(error)))
        return getattr(error, "options", None)
    return {}


def _read(adapter: JudgedAdapter, source: AdapterSource, shapes_only: bool) -> None:
    formats = source.manager.extensions.file_formats
    adapter.tensors = read_weights(adapter.file, shapes_only, formats=formats)


def _judge_weights(
    adapter: JudgedAdapter,
    source: AdapterSource,
    make_source: Callable[[LoRAConfig], AdapterSource],
    shapes_only: bool,
) -> None:
    """Note what is wrong with options' files, with tensors, module by module, and with modules, layer by layer."""
    beside = LoRAModel(1, 1, {})
    beside.beside = dict(adapter.helper.beside)
    options = {"device": "meta" if shapes_only else "cpu", "dtype": source.reading["dtype"]}
    with adapter.noting():
        read_option_files(beside, adapter.folder, source.manager.extensions, shapes_only, **options)
    try:
        source.manager.wrapped.judge(beside)
    except NeedsOption as error:
        adapter.problems.append(str(error))
        source = make_source(replace(source.manager.lora_config, **error.options))
    except ValueError:
        pass  # each layer is asked once more
    adapter.problems += fold(_problems_of_modules(adapter, source))
    adapter.problems += fold(_problems_of_layers(adapter, source, beside))


def _problems_of_modules(adapter: JudgedAdapter, source: AdapterSource) -> list[str]:
    options = dict(source.reading)
    if source.manager.extensions.files_in(adapter.folder):
        options["model_vocab_size"] = None
    load = partial(LoRAModel.from_lora_tensors, 1, peft_helper=adapter.helper, **options)
    left_out = partial(is_left_out, skip_prefixes=options["skip_prefixes"])
    read = {n: tensor for n, tensor in adapter.tensors.items() if not left_out(n)}
    problems = []
    for tensors in _by_module(read) or [{}]:
        try:
            adapter.loras.update(load(tensors).loras)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _problems_of_layers(adapter: JudgedAdapter, source: AdapterSource, beside: LoRAModel) -> list[str]:
    wrapped, problems = source.manager.wrapped, {}
    layers: dict[str | None, dict[str, LoRALayerWeights]] = defaultdict(dict, {"": {}})
    for name, weights in adapter.loras.items():  # those for no layer all in one
        layers[wrapped.claims.get(name)][name] = weights
    for loras in layers.values():
        of_layer = LoRAModel(1, 1, loras)
        of_layer.beside = beside.beside
        try:
            wrapped.judge(of_layer)
        except ValueError as error:
            problems[str(error)] = None
    return list(problems)


def _by_module(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors of one module together, with PEFT's prefix and without it."""
    groups: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module = re.split(r"\.(?:lora_|base_layer)", name.removeprefix(PEFT_PREFIX))[0]
        groups[module][name] = tensor
    return list(groups.values())


def fold(problems: Iterable[str]) -> list[str]:
    """What is wrong in the same way in many layers is said once, of the first of them."""
    alike: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        alike[re.sub(r"\.\d+\.", ".#.", problem)].append(problem)
    return [group[0] + _and_more(len(group) - 1) for group in alike.values()]


def _and_more(count: int) -> str:
    return f" (and so in {count} more layer{'s' if count > 1 else ''})" if count else ""
