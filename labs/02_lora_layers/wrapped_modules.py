"""The wrapped layers of one model. Stands for the module half of vllm/lora/model_manager.py (v0.22.1)."""

from minivllm.labs import Todo
import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.embedding import ParallelLMHead
from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.lora.checks import nearest_names
from minivllm.lora.expert_parts import conform_experts, pack_experts, process_packed_modules_mapping
from minivllm.lora.layers import (
    BaseLayerWithLoRA,
    FusedMoEWithLoRA,
    LinearScalingRotaryEmbeddingWithLoRA,
)
from minivllm.lora.layers.base import extras_of
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.names import is_in_target_modules
from minivllm.lora.new_embeddings import Vocabulary
from minivllm.lora.punica_wrapper import PunicaWrapperBase
from minivllm.lora.replace import (
    from_layer,
    from_layer_logits_processor,
    layers_to_wrap,
    replace_submodule,
)
from minivllm.lora.storage import storage_bytes


class WrappedModules:
    """Every wrapped layer of a model, by name; conforms, checks, packs and writes whole adapters.

    modules          module name -> wrapped layer; a layer with several names is here under its first
    packed_modules   fused module name -> names of the parts that adapters name, in slice order
    targets          every name that an adapter may use -> (module name, part)
    vocabulary       the embedding and the logits processor, where adapters may add tokens
    rotaries         rotary tables, where adapters may have been trained at longer contexts

    Raises ValueError when the model has no linear, a layer that no wrapper takes, or not what `target_modules`
    names.
    """

    def __init__(self, model: nn.Module, lora_config: LoRAConfig, punica_wrapper: PunicaWrapperBase) -> None:
        self.lora_config = lora_config
        self.punica_wrapper = punica_wrapper
        self.packed_mapping = process_packed_modules_mapping(model)
        self.is_3d_moe = getattr(model, "is_3d_moe_weight", False)
        self.modules: dict[str, BaseLayerWithLoRA] = {}
        self.packed_modules: dict[str, list[str]] = {}
        self.targets: dict[str, tuple[str, int]] = {}
        layers = layers_to_wrap(model)
        if not layers:
            raise ValueError(f"{type(model).__name__} has no linear layer that LoRA could be applied to")
        names = [name for names in layers.values() for name in names]
        self._refuse_unknown_targets(names)
        self._refuse_unwrappable_targets(model, names)
        heads = {layer: names for layer, names in layers.items() if isinstance(layer, ParallelLMHead)}
        self._wrap_all(model, {layer: names for layer, names in layers.items() if layer not in heads})
        self._wrap_heads(model, heads)
        self.vocabulary = Vocabulary(
            self.modules,
            getattr(model, "embedding_modules", {}),
            getattr(getattr(model, "config", None), "tie_word_embeddings", False),
            lora_config.lora_extra_vocab_size,
        )
        self.rotaries = self._wrap_rotaries(model, lora_config.long_lora_scaling_factors)

    # region lab 2.5: wrap every layer of a model, once
    def _wrap_all(self, model: nn.Module, layers: dict[nn.Module, list[str]]) -> None:
        """Put a wrapper in every place where a wanted layer is, and note what adapters may call it.

        layers   every layer of the model that may be adapted -> its names; it has several where modules share it

        A layer is wanted if any of its names is. It gets one wrapper (`_wrap`), which then stands under all of its
        names; `modules` and `packed_modules` have it under the first. In `targets` are its names, all of them, with
        part 0; of a layer that checkpoints name part by part (`_names_of_parts` is not empty) instead the names of
        the parts, each with its number.
        """
        raise Todo("lab 2.5: wrap every layer of a model, once")

    # endregion

    def _wrap_heads(self, model: nn.Module, heads: dict[ParallelLMHead, list[str]]) -> None:
        """Adapters name `lm_head`, but the logits processor beside it is what is wrapped."""
        for head, (name, *_) in heads.items():
            if not self._is_wanted(name):
                continue
            parent, dot, _ = name.rpartition(".")
            place = f"{parent}{dot}logits_processor"
            if not hasattr(model.get_submodule(parent), "logits_processor"):
                raise ValueError(f"{name} cannot be wrapped for LoRA: the model has no {place}")
            wrapped = from_layer_logits_processor(
                model.get_submodule(place), head, self.lora_config.max_loras, self.lora_config
            )
            wrapped.set_mapping(self.punica_wrapper)
            replace_submodule(model, place, wrapped)
            self.modules[name] = wrapped
            self.targets[name] = (name, 0)

    def _wrap_rotaries(
        self, model: nn.Module, factors: tuple[float, ...] | None
    ) -> list[LinearScalingRotaryEmbeddingWithLoRA]:
        rotaries = []
        for name, layer in list(model.named_modules()) if factors else []:
            if isinstance(layer, RotaryEmbedding):
                wrapped = LinearScalingRotaryEmbeddingWithLoRA(layer, factors, self.lora_config.max_loras)
                wrapped.set_mapping(self.punica_wrapper)
                rotaries.append(replace_submodule(model, name, wrapped))
        return rotaries

    def stretch_rotaries(self, in_slots: list[LoRAModel | None]) -> None:
        """Before a step: whose rotary factor counts in each slot."""
        for rotary in self.rotaries:
            rotary.set_factors([lora.beside.get("scaling_factor", 1.0) if lora else 1.0 for lora in in_slots])

    def _is_wanted(self, name: str) -> bool:
        return is_in_target_modules(name, self.lora_config.target_modules, self.packed_mapping)

    def _names_of_parts(self, name: str) -> list[str]:
        """What a checkpoint calls the parts of a fused module; [] where it has one name for all of it."""
        prefix, dot, suffix = name.rpartition(".")
        parts = self.packed_mapping.get(suffix, [])
        return [prefix + dot + part for part in parts] if len(parts) > 1 else []

    def _wrap(self, name: str, layer: nn.Module) -> BaseLayerWithLoRA:
        parts = self.packed_mapping.get(name.rpartition(".")[2], [])
        if isinstance(layer, FusedMoE):
            parts = ["w13"] if self.is_3d_moe else ["w1", "w3"]
        wrapped = from_layer(layer, self.lora_config.max_loras, self.lora_config, parts)
        if not isinstance(wrapped, BaseLayerWithLoRA):
            raise ValueError(f"{name} ({type(layer).__name__}) cannot be wrapped for LoRA")
        wrapped.set_mapping(self.punica_wrapper)
        return wrapped

    def _refuse_unknown_targets(self, names: list[str]) -> None:
        """ValueError for a target that is no module here: a typing error would otherwise adapt nothing."""
        for target in self.lora_config.target_modules or []:
            if not any(is_in_target_modules(name, [target], self.packed_mapping) for name in names):
                known = sorted({name.rpartition(".")[2] for name in names})
                raise ValueError(
                    f"target_modules names '{target}', but the model has only {', '.join(known)}"
                )

    def _refuse_unwrappable_targets(self, model: nn.Module, names: list[str]) -> None:
        """ValueError for a module that `target_modules` wants and no wrapper knows, such as one of torch's own."""
        if self.lora_config.target_modules is None:
            return
        ends = {name.rpartition(".")[2] for name in names}
        for name, module in model.named_modules():
            if name not in names and name.rpartition(".")[2] in ends and self._is_wanted(name):
                raise ValueError(
                    f"{name} ({type(module).__name__}) cannot be wrapped for LoRA, but target_modules names it"
                )

    def conform(self, lora: LoRAModel) -> None:
        """Bring an adapter that is not packed yet into this model's form, as far as that is a matter of form.

        One adapter for a whole fused module becomes one for each part, with the same A and a part of B. Tokens that
        the adapter adds become a matter of the modules that read and write them. ValueError where they do not fit,
        for a module and a part of it, and for a bias on B where there is no room. What else cannot be brought into
        form `check` refuses.
        """
        for name, parts in self.packed_modules.items():
            if isinstance(layer := self.modules[name], FusedMoEWithLoRA):
                conform_experts(lora, name, layer, parts)
                continue
            whole = lora.get_lora(name)
            if whole is None or whole.is_packed:
                continue
            if also := [part for part in parts if part in lora.loras]:
                raise ValueError(
                    f"the adapter has weights for {name} and for {', '.join(also)}, a part of it; give either"
                )
            heights = [layer.part_shape(i)[1] for i in range(len(parts))]
            del lora.loras[name]
            lora.loras.update(zip(parts, whole.split(parts, heights)))
        self.vocabulary.conform(lora)
        self._refuse_biases_without_room(lora)

    def _refuse_biases_without_room(self, lora: LoRAModel) -> None:
        for name, weights in lora.loras.items():
            if weights.is_packed or "bias" not in weights.beside or name not in self.targets:
                continue
            module = self.modules[self.targets[name][0]]
            if not module.is_linear:
                raise ValueError(
                    f"{name} has a bias on B (lora_bias), which embeddings and experts cannot have; train without"
                )
            if not module.extra_slots:
                raise ValueError(f"{name} has a bias on B (lora_bias); pass --enable-lora-bias")

    # region lab 2.6: refuse an adapter that does not fit
    def check(self, lora: LoRAModel) -> None:
        """ValueError unless every module of the adapter exists here, is wrapped, and has fitting shapes.

        An adapter that names other modules, even one of them, would otherwise lose those in silence, and the base
        model be served in its name. `_unmatched` words the error for all such names together. What is already
        packed has been checked before. Nothing changes here, whatever is found.
        """
        raise Todo("lab 2.6: refuse an adapter that does not fit")

    def _check_shapes(self, name: str, weights: LoRALayerWeights) -> None:
        """ValueError that names the module unless it is a target, its rank fits a slot, and A and B fit their part.

        For a fused module the message lists the parts to name instead (`packed_modules`), for a rank `max_lora_rank`
        and the option `--max-lora-rank r` that would admit it, for A, (r, K), and B, (N, r), the shapes they have
        and should have, as tuples; `_shape_of` knows K and N of a target.
        """
        raise Todo("lab 2.6: refuse an adapter that does not fit")

    # endregion

    def _shape_of(self, target: str) -> tuple[int, int]:
        """K and N that A and B of a target must have: a part's where the module is fused, else the module's."""
        module_name, part = self.targets[target]
        module = self.modules[module_name]
        return module.part_shape(part) if module_name in self.packed_modules else module.whole_shape

    def _unmatched(self, unknown: list[str]) -> str:
        shown = []
        for name in unknown[:4]:
            near = nearest_names(name, list(self.targets))
            shown.append(f"'{name}'" + (f" (nearest: {', '.join(near)})" if near else ""))
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        limit = self.lora_config.target_modules
        why = f"; the engine wraps only target_modules={limit}" if limit else ""
        return f"adapter targets modules that the model does not offer: {', '.join(shown)}{more}{why}"

    def pack(self, lora: LoRAModel) -> None:
        """One entry for each of `modules`: parts of fused ones together, scaling folded into B.

        Done once, when an adapter is registered: no step pays for it.
        """
        parts_of: dict[str, list[LoRALayerWeights | None]] = {}
        for target, (name, i) in self.targets.items():
            if (weights := lora.loras.pop(target, None)) is not None:
                parts_of.setdefault(name, [None] * max(1, len(self.packed_modules.get(name, []))))[i] = (
                    weights
                )
        for name, parts in parts_of.items():
            lora.loras[name] = self._packed(name, parts)

    def _packed(self, name: str, parts: list[LoRALayerWeights | None]) -> LoRALayerWeights:
        if name not in self.packed_modules:
            return parts[0].optimize()
        if isinstance(layer := self.modules[name], FusedMoEWithLoRA):
            return pack_experts(name, layer, parts).optimize()
        return PackedLoRALayerWeights.pack(parts)

    # region lab 2.7: a whole adapter into a slot
    def write(self, lora: LoRAModel, slot: int) -> None:
        """Copy a packed adapter into one slot of every layer.

        A module for which the adapter has no weights is cleared: it would keep the last adapter's. Whatever stops the
        copy on its way, Ctrl-C included, is raised on, with the slot left empty in every layer.
        """
        raise Todo("lab 2.7: a whole adapter into a slot")

    # endregion

    def dummy(self, lora_id: int, rank: int) -> LoRAModel:
        """An adapter of zeros over everything that is wrapped."""
        loras = {}
        for target, (name, _) in self.targets.items():
            width, height = self._shape_of(target)
            dtype = self.modules[name].a_slots[0].dtype
            loras[target] = LoRALayerWeights.create_dummy_lora_weights(
                target, width, height, rank, dtype, "cpu"
            )
        dummy = LoRAModel(lora_id, rank, loras)
        dummy.beside["has_slots_vocabulary"] = True
        return dummy

    @property
    def slot_bytes(self) -> int:
        """Bytes that one more slot takes in all layers, whatever is in it, wherever the backend put it."""
        return self.buffer_bytes // self.lora_config.max_loras

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots. Base weights that a backend keeps in one piece with them do not count."""
        slots, weights = [], []
        for layer in self.modules.values():
            slots += (*layer.a_slots, *layer.b_slots, *layer.extra_slots, *(layer.storage or ()))
            weights += (layer.weight, layer.bias) if layer.is_linear else ()
        slots = [slot for slot in slots if slot is not None]
        held = {slot.untyped_storage() for slot in slots}
        # A quantized weight is of another class, and never in one piece with slots.
        plain = [weight for weight in weights if type(weight) is nn.Parameter]
        return storage_bytes(slots) - sum(w.nbytes for w in plain if w.untyped_storage() in held)

    @property
    def tables(self) -> list[torch.Tensor]:
        """What layers have allocated beside slots."""
        return [table for layer in (*self.modules.values(), *self.rotaries) for table in layer.tables]
