"""Finding and wrapping a model's layers. Stands for the module half of vllm/lora/model_manager.py (v0.22.1)."""

from minivllm.labs import Todo
from collections.abc import Callable
from typing import Any

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.adaptable import (
    layers_to_wrap,
    process_packed_modules_mapping,
    refuse_targets,
    wrapped_layer,
)
from minivllm.lora.backend import Backend
from minivllm.lora.layers.base import BaseLayerWithLoRA
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import is_in_target_modules
from minivllm.lora.replace import replace_submodule
from minivllm.lora.seams import model_options

# Module name -> what an adapter has for it, under the names that the adapter uses.
Found = dict[str, dict[str, LoRALayerWeights]]


class ModuleWrapping:
    """Every wrapped layer of a model, by name, and what adapters may call them.

    modules          module name -> wrapped layer; a layer with several names is here under its first
    packed_modules   fused module name -> names of the parts that adapters name, in slice order
    targets          every name that adapters may use for a slice -> (module name, part)
    claims           every name that adapters may use, those of whole fused modules among them -> module name

    For options, empty without:
    givers       name in `LoRAModel.beside` -> what adds it to what was found for the layers
    before_step  called before every step with the adapter in each slot, None = free
    others       what options have wrapped that has no slots; its `tables` are what it has allocated

    Raises ValueError when the model has no linear, a layer that no wrapper takes, or not what `target_modules`
    names.
    """

    def __init__(self, model: nn.Module, lora_config: LoRAConfig, backend: Backend) -> None:
        self.lora_config = lora_config
        self.backend = backend
        self.packed_mapping = process_packed_modules_mapping(model)
        self.modules: dict[str, BaseLayerWithLoRA] = {}
        self.packed_modules: dict[str, list[str]] = {}
        self.targets: dict[str, tuple[str, int]] = {}
        self.claims: dict[str, str] = {}
        self.givers: dict[str, Callable[[LoRAModel, Found], None]] = {}
        self.before_step: list[Callable[[list[LoRAModel | None]], None]] = []
        self.others: list[Any] = []
        layers = layers_to_wrap(model)
        refuse_targets(model, layers, lora_config.target_modules, self.packed_mapping)
        self._wrap_all(model, layers)
        for add_option in model_options:
            add_option(model, self, lora_config)

    # region lab 2.5: wrap every layer of a model, once
    def _wrap_all(self, model: nn.Module, layers: dict[nn.Module, list[str]]) -> None:
        """Put a wrapper in every place where a wanted layer is, and note what adapters may call it.

        layers   every layer of the model that may be adapted -> its names; it has several where modules share it

        A layer is wanted if any of its names is. It gets one wrapper (`_wrap`), which then stands under all of its
        names (`place_of`); `modules` and `packed_modules` have it under the first. Adapters name its parts
        (`_names_of_parts`), or the layer itself where it has none: these names go into `targets`, under each of the
        layer's names, with their numbers. `_claim` tells the wrapper of them.
        """
        raise Todo("lab 2.5: wrap every layer of a model, once")

    # endregion

    def _is_wanted(self, name: str) -> bool:
        return is_in_target_modules(name, self.lora_config.target_modules, self.packed_mapping)

    def _names_of_parts(self, name: str) -> list[str]:
        """What a checkpoint calls the parts of a fused module; [] where it has one name for all of it."""
        prefix, dot, suffix = name.rpartition(".")
        parts = self.packed_mapping.get(suffix, [])
        return [prefix + dot + part for part in parts] if len(parts) > 1 else []

    def _wrap(self, model: nn.Module, name: str, layer: nn.Module) -> BaseLayerWithLoRA:
        """A layer's wrapper, with empty slots where the backend wants them."""
        parts = self.packed_mapping.get(name.rpartition(".")[2], [])
        wrapped = wrapped_layer(model, name, layer, self.lora_config, parts)
        wrapped.set_mapping(self.backend)
        return wrapped

    def _claim(self, wrapped: BaseLayerWithLoRA, names: list[str]) -> None:
        """Tell a wrapper what adapters may call its slices, and note all that it answers to."""
        for name in names:
            targets = self._names_of_parts(name) or ([name] if wrapped.n_slices == 1 else [])
            wrapped.targets.update({target: i for i, target in enumerate(targets)})
            answers_to = (*targets, *wrapped.also_called(name))
            self.claims.update(dict.fromkeys(answers_to, names[0]))
