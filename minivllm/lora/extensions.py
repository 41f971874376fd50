"""What adapters have, come from and are computed by beyond the plain case: one value, `LoRAExtensions`.

The core asks an extension only where its own way has come to an end, such as at a layer that is no linear, or at a path
that is no folder. So a plain adapter on a CPU never runs one, and `PLAIN` serves it. Whoever makes a worker manager
gives it the extensions; `minivllm.assembly` has all that there are. vLLM (v0.22.1) decides by flags inside vllm/lora/.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.weights_files import files_in

if TYPE_CHECKING:
    from minivllm.lora.backend import Backend
    from minivllm.lora.checks import NeedsOption
    from minivllm.lora.lora_model import LoRAModel
    from minivllm.lora.lora_weights import LoRALayerWeights
    from minivllm.lora.peft_helper import PEFTHelper
    from minivllm.lora.wrapping import WrappedModules


class WrappedOption:
    """What an option does for the adapters of one wrapped model. Each method does nothing here.

    tables         what the option has allocated beside slots (long context alone: `memory_stats` counts it)
    follows_slots  whether `before_step` is to be called (long context, DoRA)
    """

    tables: Sequence[torch.Tensor] = ()
    follows_slots = False

    def judge(self, lora: "LoRAModel", found: "dict[str, dict[str, LoRALayerWeights]]") -> None:
        """Add what the option brings for layers to `found`; ValueError for what does not fit the model.

        found   module name -> what the adapter has for it, by the names that the adapter uses
        """

    def accepted(self, lora: "LoRAModel") -> None:
        """The layers have packed what `judge` gave them (added tokens forget it here, DoRA makes scales of it)."""

    def before_step(self, in_slots: "list[LoRAModel | None]") -> None:
        """Prepare a step.   in_slots: (S,) the adapter in each slot, None = free"""


class AdapterOption:
    """Something that adapters may have beyond A and B of linears. A subclass overrides what its option needs.

    config_field  the field of adapter_config.json that says whether an adapter has it; None: none does
    tensor_marks  parts of tensors' names: `read_tensor` reads a tensor whose name has one of them
    files         names of the one file that it adds to an adapter's folder, the preferred one first. Such an adapter
                  is read tensor by tensor (added tokens alone have one; `judge_adapter` wants what it holds apart)
    kept_beside   kinds of what it reads beside B that stay as the file has them, neither converted nor scaled
    wrappers      classes of wrapped layers that are no linears: see `minivllm.options.option_layer`
    part_names    last part of a module's name -> further names that trainers have for parts of it
    """

    config_field: str | None = None
    tensor_marks: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    kept_beside: tuple[str, ...] = ()
    wrappers: tuple[type, ...] = ()
    part_names: Mapping[str, tuple[str, ...]] = {}

    def read_config(self, value: Any, peft_helper: "PEFTHelper") -> None:
        """Take in the field's value, which is neither None nor False. ValueError for one that it cannot have."""

    def check_config(
        self, value: Any, peft_helper: "PEFTHelper", lora_config: LoRAConfig
    ) -> "list[str | NeedsOption]":
        """Why the engine does not serve an adapter with this value, [] if it does.

        Sentences, or a `NeedsOption` for what it would serve with other options.
        """
        return []

    def read_tensor(
        self, name: str, tensor: torch.Tensor, peft_helper: "PEFTHelper"
    ) -> tuple[str, str | None, torch.Tensor]:
        """What a tensor is, as `lora_model.read_tensor` says it. ValueError for one that is not supported.

        What goes beside A and B is scaled as B is, but for `kept_beside`. Slots hold zeros where an adapter has none.
        """
        return name, None, tensor

    def read_file(
        self,
        path: str,
        tensors: dict[str, torch.Tensor],
        lora: "LoRAModel",
        device: torch.device | str,
        dtype: torch.dtype | None,
    ) -> None:
        """Put what the tensors of the option's file say beside an adapter. ValueError names the path."""

    def wrap_model(
        self, model: nn.Module, wrapped: "WrappedModules", lora_config: LoRAConfig
    ) -> WrappedOption | None:
        """Prepare a model whose layers have just been wrapped. None if the option has nothing more to do there."""
        return None


@dataclass(frozen=True, eq=False)
class LoRAExtensions:
    """The extensions of one engine's adapters. Without any it serves safetensors in local folders, on a CPU.

    options           what adapters may have beyond A and B
    sharded_wrappers  class of wrapped layers -> the one that takes its place with `fully_sharded_loras`
    file_formats      end of a weights file's name -> (path, open file, most tensors) -> its tensors by name
    folder_sources    each makes a local folder of a path that is none, such as a hub id. None: the path is not of its
                      kind. FileNotFoundError says why it cannot give the folder of one that is
    read_request      reads an adapter whose tensors the request brings: (request, LoRAConfig, the model's longest
                      context, these extensions, and the parameters of `LoRAModel.from_local_checkpoint`) -> LoRAModel
    backends          name of a backend -> (most tokens, most requests, device, LoRAConfig) -> a `Backend`
    make_slot_writer  on a GPU: (wrapped layers, device) -> what writes their slots; None = the layers do
    """

    options: tuple[AdapterOption, ...] = ()
    sharded_wrappers: Mapping[type, type] = field(default_factory=dict)
    file_formats: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    folder_sources: tuple[Callable[[str], str | None], ...] = ()
    read_request: "Callable[..., LoRAModel] | None" = None
    backends: "Mapping[str, Callable[..., Backend]]" = field(default_factory=dict)
    make_slot_writer: Callable[..., Any] | None = None

    @cached_property
    def wrappers(self) -> list[type]:
        """The options' classes of wrapped layers, which are asked in this order."""
        return [wrapper for option in self.options for wrapper in option.wrappers]

    def files_in(self, folder: str) -> list[tuple[AdapterOption, Path]]:
        """What options have added to an adapter's folder: each of them, and its preferred file of those there."""
        there = ((option, files_in(folder, option.files)) for option in self.options)
        return [(option, paths[0]) for option, paths in there if paths]

    @cached_property
    def part_names(self) -> dict[str, tuple[str, ...]]:
        """Last part of a module's name -> further names that trainers have for parts of it."""
        return {name: parts for option in self.options for name, parts in option.part_names.items()}

    def wrapper_for(self, wrapper: type, lora_config: LoRAConfig) -> type:
        """The class that is made where `wrapper` fits."""
        return self.sharded_wrappers.get(wrapper, wrapper) if lora_config.fully_sharded_loras else wrapper


PLAIN = LoRAExtensions()
