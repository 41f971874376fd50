"""Which layers of a model may be adapted, which wrapped layer takes the place of each, and whole adapters into them.

Stands for vllm/lora/utils.py and the module half of vllm/lora/model_manager.py (v0.22.1).
"""

from labs.kit.overlay import Todo
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import LinearBase
from minivllm.lora.backend import Backend
from minivllm.lora.checks import unmatched
from minivllm.lora.extensions import PLAIN, LoRAExtensions, WrappedOption
from minivllm.lora.layers.base import BaseLayerWithLoRA, BaseLinearLayerWithLoRA, Parts
from minivllm.lora.layers.linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.names import is_in_target_modules

# Each says in `wraps` which base linears it takes; at most one of them takes a layer.
LINEAR_WRAPPERS: tuple[type[BaseLinearLayerWithLoRA], ...] = (
    ColumnParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    QKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
)

Layers = dict[nn.Module, list[str]]  # layer -> all names it can be reached by
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
        """Have every wanted layer answer with adapters, wherever the model has it, and note what adapters may call it.

        layers   every layer of the model that may be adapted -> its names; it has several where modules share it

        A layer is wanted if any of its names is. Then one wrapper stands in its places in the model, one for each name
        (`place_of(name)`: a wrapper may stand elsewhere than its layer). Adapters may use any name of it, for a slice
        or, as in `also_called`, for the whole layer. What they bring reaches the same slots by whatever name, and
        `modules` knows these by the layer's first.

        Where a layer cannot be wrapped, what that raises comes out, and the model is as it was.

        By hand, two blocks that share one `gate_up`, fused of gate and up. The layers are {it: ["0.gate_up",
        "1.gate_up"]}, and afterwards

            modules           {"0.gate_up": the wrapper}
            wrapper.targets   {"0.gate": 0, "0.up": 1, "1.gate": 0, "1.up": 1}, a slice's names -> its number
            claims            these four names, and "0.gate_up" and "1.gate_up", each -> "0.gate_up"

        To work out: `target_modules` is ["1.up"] alone. What are the three then, and which places have the wrapper?

        To use: `_is_wanted`, `_wrap` and `_names_of_slices`, `place_of` and `also_called` of a wrapper
        (layers/base.py), `replace_submodule`.
        """
        raise Todo("lab 2.5: wrap every layer of a model, once")

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

        An adapter names slices, and a layer judges all of its own at once. By hand, with q and v of a fused `qkv`:

            claims      {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o"}
            adapter     q, v and o
            found       {"qkv": {"q": weights, "v": weights}, "o": {"o": weights}}
            judged      {"qkv": [q's, None, v's], "o": [o's]}

        Options (`options_for`) may add to what was found, so layers see it as the options leave it. The weights of a
        name that no module claims would be lost in silence: one ValueError has all such names. Its text is that
        of `unmatched`, whose `targets` are the names in `claims`. Options and layers raise their own.
        """
        raise Todo("lab 2.7: a whole adapter, or nothing")

    def accept(self, lora: LoRAModel) -> None:
        """Bring an adapter into the form of slots. Afterwards `loras` has what each module's `write` takes.

        Of several processes that share a layer, each packs its share (`share.of(parts)`) of what fits the whole. An
        adapter that has been accepted (`is_accepted`) stays as it is, since its names are modules' by now and its B is
        scaled. One that is refused (ValueError as in `judge`), or for which memory is too short, keeps all its names
        and can be accepted later. Options that judged it hear of success alone (`accepted`).
        """
        raise Todo("lab 2.7: a whole adapter, or nothing")

    def write(self, lora: LoRAModel, slot: int) -> None:
        """Copy an adapter that was accepted into one slot, which then has nothing of the adapter before it.

        By hand: slot 0 has q and o of adapter 1, and adapter 2, which trained q alone, is written there. A row of
        adapter 2 gets adapter 2 in q, and the base model in o.

        If an error stops the copy on its way, Ctrl-C included, the slot is emptied in every layer before it is raised.
        """
        raise Todo("lab 2.7: a whole adapter, or nothing")

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


# ---- which layers, and which wrapper ------------------------------------------------------------------------------


def adaptable(model: nn.Module, extensions: LoRAExtensions) -> tuple[Layers, dict[str, list[str]]]:
    """Every layer that may be adapted, and ends of the names of fused ones -> those of their parts, in order.

    Adaptable are linears inside the model, and what options find.
    """
    layers: Layers = {}
    packed = dict(getattr(model, "packed_modules_mapping", {}))
    for name, layer in model.named_modules(remove_duplicate=False):
        plugged = plugged_wrapper(model, name, layer, extensions)
        if plugged or is_plain(layer):
            layers.setdefault(layer, []).append(name)
        if plugged and (parts := plugged.parts_in(model, name, layer)):
            packed[end_of(name)] = parts
    return layers, packed


def is_plain(layer: nn.Module) -> bool:
    """Whether it is a linear inside the model."""
    return isinstance(layer, LinearBase) and not layer.is_head


def plugged_wrapper(model: nn.Module, name: str, layer: nn.Module, extensions: LoRAExtensions) -> Any:
    """The option's wrapper for a layer that is no plain linear; None if there is none."""
    if is_plain(layer):
        return None
    return next((w for w in extensions.wrappers if w.parts_in(model, name, layer) is not None), None)


def end_of(name: str) -> str:
    """The last part of a module's name."""
    return name.rpartition(".")[2]


def ends_of(layers: Layers) -> list[str]:
    """Ends of the names of all layers, sorted."""
    return sorted({end_of(name) for names in layers.values() for name in names})


def refuse_targets(
    model: nn.Module,
    layers: Layers,
    target_modules: list[str] | None,
    packed: dict[str, list[str]],
    part_names: Mapping[str, Sequence[str]],
) -> None:
    """ValueError unless everything that `target_modules` names is there and may be adapted.

    Else a typing error would adapt nothing, and a module of torch's own would be left alone in silence. It is a
    ValueError, too, where there is nothing to adapt at all.
    """
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer that LoRA could be applied to")
    names, ends = {name for of_layer in layers.values() for name in of_layer}, ends_of(layers)
    for target in target_modules or []:
        if not any(is_in_target_modules(name, [target], packed, part_names) for name in names):
            raise ValueError(f"target_modules names '{target}', but the model has only {', '.join(ends)}")
    for name, module in model.named_modules() if target_modules is not None else ():
        is_unknown = name not in names and end_of(name) in ends
        if is_unknown and is_in_target_modules(name, target_modules, packed, part_names):
            raise ValueError(
                f"{name} ({type(module).__name__}) cannot be wrapped for LoRA, but target_modules names it"
            )


def from_layer(
    layer: nn.Module,
    max_loras: int,
    lora_config: LoRAConfig,
    packed_modules_list: list[str],
    model_config: object | None = None,
    *,
    extensions: LoRAExtensions = PLAIN,
) -> nn.Module:
    """The layer wrapped, with empty slots; or the layer itself where no wrapper fits. vLLM: `from_layer`.

    max_loras             how many slots
    packed_modules_list   the parts of the layer that the checkpoint names one by one, [] for one that is not fused

    `LINEAR_WRAPPERS` are asked first, then those of options. The first that can wrap it does; `takes` says so, told how
    many parts there are.
    """
    for wrapper in (*LINEAR_WRAPPERS, *extensions.wrappers):
        if wrapper.takes(layer, len(packed_modules_list)):
            wrapped = extensions.wrapper_for(wrapper, lora_config)(layer)
            wrapped.create_lora_weights(max_loras, lora_config)
            return wrapped
    return layer


def replace_submodule(model: nn.Module, module_name: str, new_module: nn.Module) -> nn.Module:
    """Put `new_module` where `module_name` is, and give it back. vLLM: the same name."""
    model.set_submodule(module_name, new_module)
    return new_module
