"""Wrapped linears with room for scales, DoRA adapters for them, and what PEFT makes of each slice alone."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.dora.scales import SCALE, ScaledLinears
from minivllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from minivllm.lora.lora_weights import LoRALayerWeights
from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.wrapping import from_layer
from minivllm.vllm.punica_selector import get_punica_wrapper

K, SLOTS = 12, 3
# What makes a base linear of K inputs, and the names of its slices.
KINDS = {
    "one": (partial(RowParallelLinear, K, 10), ["o_proj"]),
    "merged": (partial(MergedColumnParallelLinear, K, [6, 9]), ["gate_proj", "up_proj"]),
    "qkv": (partial(QKVParallelLinear, K, 4, 4, 2), ["q_proj", "k_proj", "v_proj"]),
}


def linear(
    kind: str = "one", bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> LinearBase:
    generator = torch.Generator().manual_seed(seed)
    base = KINDS[kind][0](bias=bias, params_dtype=dtype)
    for parameter in base.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return base.requires_grad_(False)


class Wrapped:
    """A base linear in its wrapper, with `SLOTS` slots whose adapters have the ids 1, 2 and 3, and room for scales."""

    def __init__(self, base: LinearBase, kind: str = "one", backend: str = "grouped") -> None:
        names = KINDS[kind][1]
        dtype = base.weight.dtype
        config = LoRAConfig(8, SLOTS, lora_dtype=dtype, punica_backend=backend)
        self.base = base
        self.backend = get_punica_wrapper(64, 64, "cpu", lora_config=config)
        self.layer = from_layer(base, SLOTS, config, names if len(names) > 1 else [])
        self.layer.set_mapping(self.backend)
        self.scaled = ScaledLinears({"m": self.layer})

    def write(self, slot: int, adapter: "Adapter | None") -> None:
        """An adapter into a slot, its scales as PEFT has them; None empties it."""
        if adapter is None:
            self.layer.slots.clear(slot)
        else:
            self.layer.slots.write(slot, adapter.parts(self.base, with_scales=True))

    def begin(self, ids: list[int]) -> None:
        """A step with these adapters, row by row; 0 = base."""
        self.backend.begin_step(LoRAMapping(tuple(ids), tuple(ids)), [1, 2, 3])

    @torch.inference_mode()
    def rows(self, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """One step.   x: (T, K) -> (T, N)"""
        self.begin(ids)
        return self.layer(x)[0]


@dataclass
class Adapter:
    """Of a slice, or several: A, B without its scaling, a magnitude (None: a plain adapter). None: leaves it alone."""

    kind: str
    slices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None]
    scaling: float = 1.5

    def parts(self, base: LinearBase, with_scales: bool = False) -> list[LoRALayerWeights | None]:
        """As a slot takes them: the scaling is in B."""
        made = []
        for i, (name, own) in enumerate(zip(KINDS[self.kind][1], self.slices)):
            if own is None:
                made.append(None)
                continue
            a, b, magnitude = own
            part = LoRALayerWeights(name, len(a), len(a), a, b * self.scaling, 1.0)
            if with_scales and magnitude is not None:
                part.beside[SCALE] = (self.scale(base, i) - 1)[None].to(b.dtype)
            made.append(part)
        return made

    def magnitudes(self) -> list[torch.Tensor | None]:
        return [own and own[2][None] for own in self.slices]

    def scale(self, base: LinearBase, i: int) -> torch.Tensor:
        """Of slice i's outputs, by PEFT's own norm, in float64: (N_i,)"""
        from peft.tuners.lora.dora import DoraLinearLayer

        a, b, magnitude = (tensor.double() for tensor in self.slices[i])
        norm = DoraLinearLayer(fan_in_fan_out=False).get_weight_norm(rows_of(base, i), b @ a, self.scaling)
        return magnitude / norm

    @torch.no_grad()
    def answer(self, base: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """What PEFT's layers give for each slice, side by side.   x: (T, K) -> (T, N)"""
        return torch.cat([self._of_peft(base, i, x) for i in range(len(self.slices))], dim=1)

    def _of_peft(self, base: LinearBase, i: int, x: torch.Tensor) -> torch.Tensor:
        from peft import LoraConfig, get_peft_model

        weight = rows_of(base, i)
        model = nn.Sequential(nn.Linear(weight.shape[1], len(weight), bias=base.bias is not None)).double()
        model[0].weight.data = weight
        if base.bias is not None:
            model[0].bias.data = base.bias.double().split(base.output_partition_sizes)[i]
        if self.slices[i] is None:
            return model(x)
        a, b, magnitude = self.slices[i]
        config = LoraConfig(
            r=len(a),
            lora_alpha=self.scaling * len(a),
            target_modules=["0"],
            use_dora=magnitude is not None,
        )
        module = get_peft_model(model, config).base_model.model[0].double()
        module.lora_A["default"].weight.data, module.lora_B["default"].weight.data = a.double(), b.double()
        if magnitude is not None:
            module.lora_magnitude_vector["default"].weight.data = magnitude.double()
        return module(x)


def rows_of(base: LinearBase, i: int) -> torch.Tensor:
    """Slice i of the weight, in float64, also where it is int8."""
    weight = base.weight if type(base.weight) is nn.Parameter else base.weight.dequantize()
    return weight.double().split(base.output_partition_sizes)[i].clone()


def adapter(
    kind: str = "one",
    seed: int = 0,
    is_dora: bool = True,
    without: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> Adapter:
    """A random one, of another rank for each slice.   without: slices that it leaves alone"""
    generator = torch.Generator().manual_seed(100 + seed)
    slices = []
    for i, height in enumerate(linear(kind).output_partition_sizes):
        rank = 2 + (i + seed) % 3
        a, b = torch.randn(rank, K, generator=generator), torch.randn(height, rank, generator=generator)
        magnitude = 0.5 + 3 * torch.rand(height, generator=generator)
        own = a.to(dtype), b.to(dtype), magnitude.to(dtype) if is_dora else None
        slices.append(None if i in without else own)
    return Adapter(kind, slices)
