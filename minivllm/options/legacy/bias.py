"""A bias on B (PEFT's `lora_bias`). Stands for `bias_enabled` of vllm/lora/layers and a part of vllm/lora/models.py
(v0.8.5)."""

from typing import Any

import torch
from torch import nn

from minivllm.config import DTYPES, LoRAConfig
from minivllm.layers.linear import RowParallelLinear
from minivllm.lora.checks import NeedsOption, unsupported
from minivllm.lora.extensions import AdapterOption, WrappedOption
from minivllm.lora.layers.base import BaseLayerWithLoRA, BaseLinearLayerWithLoRA
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.wrapping import Found, WrappedModules

BIAS = "bias"  # its name beside A and B, in weights and in slots
END = ".lora_B.bias"


class LoRABias(AdapterOption):
    """Adapters with a bias on each B, as PEFT trains them with `lora_bias`."""

    config_field = "lora_bias"
    tensor_marks = (END,)

    def check_config(self, value: Any, peft_helper: PEFTHelper, lora_config: LoRAConfig) -> list[NeedsOption]:
        if not value or lora_config.bias_enabled:
            return []
        sentence = (
            "Adapter bias cannot be used without bias_enabled: this adapter has a bias on B (lora_bias); "
        )
        return [NeedsOption(sentence + "pass --enable-lora-bias.", bias_enabled=True)]

    def read_tensor(
        self, name: str, tensor: torch.Tensor, peft_helper: PEFTHelper
    ) -> tuple[str, str, torch.Tensor]:
        """A bias (N,) as (1, N), by the name of the B that it stands beside.

        ValueError names what is no vector of floats, and any bias where the config does not say `lora_bias`.
        """
        if not peft_helper.config.get(self.config_field) or not name.endswith(END):
            raise ValueError(unsupported(name))
        if tensor.ndim != 1 or tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"{name} must be one vector of floats, got shape {tuple(tensor.shape)} of {tensor.dtype}"
            )
        return f"{name.removesuffix('bias')}weight", BIAS, tensor[None]  # (1, N)

    def wrap_model(
        self, model: nn.Module, wrapped: WrappedModules, lora_config: LoRAConfig
    ) -> "BiasesOfModel":
        """n tables (S, 1, N_i) in the slots of every linear, which are added after its product."""
        linears = (layer for layer in wrapped.modules.values() if isinstance(layer, BaseLinearLayerWithLoRA))
        for layer in linears if lora_config.bias_enabled else ():
            count, dtype, device = len(layer.slots.b[0]), layer.slots.b[0].dtype, layer.weight.device
            tables = (
                torch.zeros(count, 1, width, dtype=dtype, device=device) for width in layer.output_slices
            )
            layer.slots.beside[BIAS] = tuple(tables)
            layer.register_forward_hook(add_bias)
        return BiasesOfModel(wrapped)


class BiasesOfModel(WrappedOption):
    """Refuses biases for layers that have no room for them."""

    def __init__(self, wrapped: WrappedModules) -> None:
        self.wrapped = wrapped

    def judge(self, lora: LoRAModel, found: Found) -> None:
        for module, by_name in found.items():
            for weights in by_name.values():
                if BIAS in weights.beside:
                    _refuse_without_room(self.wrapped.modules[module], weights)


def _refuse_without_room(layer: BaseLayerWithLoRA, weights: LoRALayerWeights) -> None:
    name = weights.module_name
    if not isinstance(layer, BaseLinearLayerWithLoRA):
        raise ValueError(
            f"{name} has a bias on B (lora_bias), which embeddings and experts cannot have; train without"
        )
    if BIAS not in layer.slots.beside:
        raise ValueError(f"{name} has a bias on B (lora_bias); pass --enable-lora-bias")


def add_bias(
    layer: BaseLinearLayerWithLoRA, inputs: Any, output: tuple[torch.Tensor, None]
) -> tuple[torch.Tensor, None]:
    """y[:, slice i] += each row's own bias, in place; of terms that ranks sum, rank 0's alone.   y: (T, N)"""
    y, backend = output[0], layer.backend
    if isinstance(layer.base_layer, RowParallelLinear) and layer.base_layer.tp.rank:
        return output
    if not backend.no_lora:
        slots = backend.token_slots(len(y))[:, None]  # (T, 1)
        for columns, bias in zip(y.split(layer.output_slices, dim=1), layer.slots.beside[BIAS]):
            own = bias[slots[:, 0].clamp(min=0), 0]  # (T, N_i)
            columns += own.masked_fill(slots < 0, 0).to(y.dtype)
    return output
