"""Which adapters have magnitudes, and what of them is not served. In PEFT 0.21.2 peft/tuners/lora/dora.py."""

from typing import Any

import torch
from torch import nn

from minivllm.config import DTYPES, LoRAConfig
from minivllm.dora.scales import SCALE, ScaledLinears
from minivllm.errors import shown
from minivllm.lora.checks import NeedsOption, unsupported
from minivllm.lora.extensions import AdapterOption, WrappedOption
from minivllm.lora.layers.base import BaseLayerWithLoRA, BaseLinearLayerWithLoRA
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.wrapping import Found, WrappedModules

# The field of adapter_config.json, and what `LoRAModel.beside` says it under.
FIELD = "use_dora"
END = ".lora_magnitude_vector"
MAGNITUDE = "magnitude"  # its name beside A and B until the adapter is accepted

# Fields that PEFT refuses beside it, too.
NOT_BESIDE = ("lora_bias", "target_parameters")


class DoRA(AdapterOption):
    """Adapters with a magnitude for each row of every weight that they adapt."""

    config_field = FIELD
    tensor_marks = (END,)
    kept_beside = (MAGNITUDE,)

    def read_config(self, value: Any, peft_helper: PEFTHelper) -> None:
        if value is not True:
            raise ValueError(f"{FIELD} must be true or false, got {shown(value)}")
        peft_helper.beside[FIELD] = True

    def check_config(
        self, value: Any, peft_helper: PEFTHelper, lora_config: LoRAConfig
    ) -> list[str | NeedsOption]:
        problems: list[str | NeedsOption] = [
            f"DoRA ({FIELD}) is not supported with {field}; train without one of them."
            for field in NOT_BESIDE
            if peft_helper.config.get(field)
        ]
        if not lora_config.enable_dora:
            sentence = f"DoRA ({FIELD}) cannot be used without enable_dora; pass --enable-dora."
            problems.append(NeedsOption(sentence, enable_dora=True))
        return problems

    def read_tensor(
        self, name: str, tensor: torch.Tensor, peft_helper: PEFTHelper
    ) -> tuple[str, str, torch.Tensor]:
        """A magnitude (N,) as (1, N), by the name of the B that it stands beside.

        ValueError names what is no vector of floats, and any magnitude where the config does not say `use_dora`.
        """
        if not peft_helper.config.get(FIELD) or not name.endswith(END):
            raise ValueError(unsupported(name))
        if tensor.ndim != 1 or tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"{name} must be one vector of floats, got shape {tuple(tensor.shape)} of {tensor.dtype}"
            )
        return f"{name.removesuffix(END)}.lora_B.weight", MAGNITUDE, tensor[None]  # (1, N)

    def wrap_model(
        self, model: nn.Module, wrapped: WrappedModules, lora_config: LoRAConfig
    ) -> "DoRAOfModel | None":
        """Room for scales in the slots of every linear. ValueError where ranks share one: no rank knows its norms."""
        if not lora_config.enable_dora:
            return None
        linears = {
            name: layer
            for name, layer in wrapped.modules.items()
            if isinstance(layer, BaseLinearLayerWithLoRA)
        }
        if (shared := max((layer.tp_size for layer in linears.values()), default=1)) > 1:
            raise ValueError(
                f"enable_dora is served by one process, but tensor_parallel_size is {shared}; leave out one of them"
            )
        return DoRAOfModel(wrapped, ScaledLinears(linears))


class DoRAOfModel(WrappedOption):
    """A wrapped model with room for DoRA adapters: judges them, and makes scales of their magnitudes."""

    follows_slots = True

    def __init__(self, wrapped: WrappedModules, scaled: ScaledLinears) -> None:
        self.wrapped, self.scaled = wrapped, scaled

    def judge(self, lora: LoRAModel, found: Found) -> None:
        for module, by_name in found.items():
            for weights in by_name.values():
                if lora.beside.get(FIELD):
                    _refuse_misfit(self.wrapped.modules[module], weights)

    def accepted(self, lora: LoRAModel) -> None:
        """In the place of each magnitude beside A and B, its scale: s is in B by now."""
        for name, weights in lora.loras.items() if lora.beside.get(FIELD) else ():
            parts = list(filter(None, weights.parts))
            magnitudes = [part and part.beside.get(MAGNITUDE) for part in weights.parts]
            scales = self.scaled.scales(name, weights.parts, magnitudes)
            for part, scale in zip(parts, scales):
                part.beside = {SCALE: scale}

    def before_step(self, in_slots: list[LoRAModel | None]) -> None:
        self.scaled.has_scales = any(lora is not None and lora.beside.get(FIELD) for lora in in_slots)


def _refuse_misfit(layer: BaseLayerWithLoRA, weights: LoRALayerWeights) -> None:
    """ValueError for what has no magnitude, or not one number for each row of a linear's weight."""
    name, magnitude = weights.module_name, weights.beside.get(MAGNITUDE)
    if not isinstance(layer, BaseLinearLayerWithLoRA):
        raise ValueError(
            f"{name} is no linear inside the model, and DoRA ({FIELD}) is served on these only; leave it out of "
            "target_modules"
        )
    if magnitude is None:
        raise ValueError(f"{name} has no {END[1:]}, though adapter_config.json says {FIELD}")
    if magnitude.shape[1] != len(weights.lora_b):
        raise ValueError(f"{name} has {END[1:]} ({magnitude.shape[1]},), expected ({len(weights.lora_b)},)")
    if not magnitude.is_meta and not magnitude.isfinite().all():
        raise ValueError(f"{name} has {END[1:]} with numbers that are NaN or infinite")
