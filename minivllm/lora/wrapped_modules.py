"""A model's wrapped layers, and whole adapters into them. Stands for the module half of vllm/lora/model_manager.py
(v0.22.1)."""

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora.adaptable import Layers, adaptable, end_of, ends_of, plugged_wrapper, refuse_targets
from minivllm.lora.backend import Backend
from minivllm.lora.checks import unmatched
from minivllm.lora.extensions import PLAIN, LoRAExtensions, WrappedOption
from minivllm.lora.layers.base import BaseLayerWithLoRA, Parts
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import is_in_target_modules
from minivllm.lora.replace import from_layer, replace_submodule

# Module name -> what an adapter has for it, under the names that the adapter uses.
Found = dict[str, dict[str, LoRALayerWeights]]


class WrappedModules:
    """Wraps a model's layers; routes an adapter's weights to them by name; judges, accepts and writes all or none.

    modules   module name -> wrapped layer; a layer with several names is here under its first
    claims    every name that adapters may use, of slices and of whole fused modules -> module name
    supported_lora_modules   ends of the names of all that could be wrapped
    options    what the extensions' options do for adapters of this model (`WrappedOption`); [] without
    following  those of them that prepare each step

    Raises ValueError when the model has no linear, a layer that no wrapper fits, or not what `target_modules`
    names.
    """

    def __init__(
        self,
        model: nn.Module,
        lora_config: LoRAConfig,
        backend: Backend,
        extensions: LoRAExtensions = PLAIN,
    ) -> None:
        self.lora_config = lora_config
        self.backend = backend
        self.extensions = extensions
        self.modules: dict[str, BaseLayerWithLoRA] = {}
        self.claims: dict[str, str] = {}
        layers, self.packed_mapping = adaptable(model, extensions)
        self.supported_lora_modules = ends_of(layers)
        targets, part_names = lora_config.target_modules, extensions.part_names
        refuse_targets(model, layers, targets, self.packed_mapping, part_names)
        self._wrap_all(model, layers)
        wrapped = (option.wrap_model(model, self, lora_config) for option in extensions.options)
        self.options = [option for option in wrapped if option is not None]
        self.following = [option for option in self.options if option.follows_slots]

    # region lab 2.5: wrap every layer of a model, once
    def _wrap_all(self, model: nn.Module, layers: Layers) -> None:
        """Put a wrapper in every place where a wanted layer is, and note what adapters may call it.

        layers   every layer of the model that may be adapted -> its names; it has several where modules share it

        A layer is wanted if any of its names is. It gets one wrapper (`_wrap`), which stands in the model wherever the
        layer did (`place_of` each name). Afterwards:
        modules           the layer's first name -> its wrapper
        wrapper.targets   what adapters may call a slice, under any name of the layer (`_names_of_slices`) -> its number
        claims            these, and what the wrapper is `also_called` under any name -> the first name
        """
        for layer, names in layers.items():
            if not any(self._is_wanted(name) for name in names):
                continue
            first = names[0]
            self.modules[first] = wrapped = self._wrap(model, first, layer)
            for name in names:
                replace_submodule(model, wrapped.place_of(name), wrapped)
                targets = self._names_of_slices(name, wrapped)
                wrapped.targets.update({target: i for i, target in enumerate(targets)})
                self.claims.update(dict.fromkeys((*targets, *wrapped.also_called(name)), first))

    # endregion

    def _is_wanted(self, name: str) -> bool:
        targets, part_names = self.lora_config.target_modules, self.extensions.part_names
        return is_in_target_modules(name, targets, self.packed_mapping, part_names)

    def _wrap(self, model: nn.Module, name: str, layer: nn.Module) -> BaseLayerWithLoRA:
        """A layer's wrapper, with empty slots where the backend wants them. ValueError where none fits."""
        config, extensions = self.lora_config, self.extensions
        if plugged := plugged_wrapper(model, name, layer, extensions):
            wrapped = plugged.around(model, name, layer, config.max_loras, config)
        else:
            parts = self.packed_mapping.get(end_of(name), [])
            wrapped = from_layer(layer, config.max_loras, config, parts, extensions=extensions)
        if not isinstance(wrapped, BaseLayerWithLoRA):
            raise ValueError(f"{name} ({type(layer).__name__}) cannot be wrapped for LoRA")
        wrapped.set_mapping(self.backend)
        return wrapped

    def _names_of_slices(self, name: str, wrapped: BaseLayerWithLoRA) -> list[str]:
        """What adapters call each slice of a layer; [] where several slices have only the layer's name."""
        parts = self.packed_mapping.get(end_of(name), [])
        if len(parts) > 1:
            return [name.removesuffix(end_of(name)) + part for part in parts]
        return [name] if wrapped.n_slices == 1 else []

    # region lab 2.7: a whole adapter, or nothing
    def judge(self, lora: LoRAModel) -> dict[str, Parts]:
        """Module name -> what its layer finds in the adapter (its `judge`); the adapter stays as it is.

        Names are routed to modules (`claims`), then every one of the options (`options_for`) judges what was found for
        them and may add to it (`judge`), then layers judge. Names that no module has would be lost in silence: one
        ValueError, worded by `unmatched`, has them all. Options and layers raise their own.
        """
        if unknown := [name for name in lora.loras if name not in self.claims]:
            raise ValueError(unmatched(unknown, list(self.claims), self.lora_config.target_modules))
        found: Found = {}
        for name, weights in lora.loras.items():
            found.setdefault(self.claims[name], {})[name] = weights
        for option in self.options_for(lora):
            option.judge(lora, found)
        return {name: self.modules[name].judge(weights) for name, weights in found.items()}

    def accept(self, lora: LoRAModel) -> None:
        """Give the process's share of an adapter (`share.of(parts)`) the form of slots (`pack`), by module name; once.

        ValueError as in `judge`, before the adapter has changed. When a layer cannot pack, `loras` keeps its names, so
        that the adapter can be accepted again. Afterwards every one of the options hears of it (`accepted`).
        """
        if lora.is_accepted:
            return
        modules, judged = self.modules, self.judge(lora)
        lora.loras = {
            name: modules[name].pack(modules[name].share.of(parts)) for name, parts in judged.items()
        }
        for option in self.options_for(lora):
            option.accepted(lora)
        lora.is_accepted = True

    def write(self, lora: LoRAModel, slot: int) -> None:
        """Copy an adapter that was accepted into one slot of every layer.

        A module for which the adapter has no weights is cleared: it would keep the last adapter's. Whatever stops the
        copy on its way, Ctrl-C included, is raised on, with the slot left empty in every layer.
        """
        try:
            for name, module in self.modules.items():
                weights = lora.get_lora(name)
                if weights is None:
                    module.clear(slot)
                else:
                    module.write(slot, weights)
        except BaseException:
            for module in self.modules.values():
                module.clear(slot)
            raise

    # endregion

    def options_for(self, lora: LoRAModel) -> list[WrappedOption]:
        """The `options`, where an adapter has something beside A and B; a plain one concerns none of them."""
        beside = (weights.beside for weights in lora.loras.values() if not weights.is_packed)
        return self.options if lora.beside or any(beside) else []

    def dummy(self, lora_id: int, rank: int) -> LoRAModel:
        """An adapter of zeros over everything that is wrapped."""
        loras = {}
        for name, module in self.modules.items():
            dtype = module.slots.a[0].dtype
            for target, part in (module.targets or {name: 0}).items():
                width, height = module.part_shape(part)
                if not module.targets:  # one name for all slices together
                    height = sum(height for _, height in module.slice_sizes)
                loras[target] = LoRALayerWeights.create_dummy_lora_weights(
                    target, width, height, rank, dtype, "cpu"
                )
        return LoRAModel(lora_id, rank, loras)
