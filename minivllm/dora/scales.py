"""From magnitudes to scales of a linear's outputs. In PEFT `DoraLinearLayer` (peft/tuners/lora/dora.py, 0.21.2).

With the weight W, an adapter's s B A and its magnitude m, DoRA's weight has rows of length m in the directions of those
of W + s B A. So its output is that of the plain adapter, column by column times m / |row of W + s B A|; but the base
layer's bias, which is in that output, is not scaled.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from minivllm.layers.linear import LinearBase
from minivllm.lora.layers.base import BaseLinearLayerWithLoRA
from minivllm.lora.lora_weights import LoRALayerWeights

# Tables in slots, and what adapters have for them: scale - 1, so that zeros leave an output as it is. In 16 bits that
# is more exact, too, because scales are near 1.
SCALE = "dora_scale"

# Rows of a weight, or columns, that are taken at a time: as float32 they would be twice the weight.
AT_A_TIME = 1024


class ScaledLinears:
    """The wrapped linears of a model, with n tables (S, 1, N_i) in the slots of each.

    layers      by module name
    has_scales  whether any adapter in a slot has scales. On a GPU nobody asks: a captured step runs for all
    """

    def __init__(self, layers: Mapping[str, BaseLinearLayerWithLoRA]) -> None:
        self.layers = layers
        self.has_scales = False
        self._squares: dict[str, torch.Tensor] = {}  # by module, (N,): squared lengths of the rows of W
        # (S + 1, N) each: the tables of a layer side by side, and a last row of zeros, which slot -1 is.
        self._tables: dict[BaseLinearLayerWithLoRA, torch.Tensor] = {}
        for layer in layers.values():
            count, dtype, device = len(layer.slots.b[0]), layer.slots.b[0].dtype, layer.weight.device
            table = torch.zeros(count + 1, sum(layer.output_slices), dtype=dtype, device=device)
            self._tables[layer] = table
            of_slices = table[:count, None].split(layer.output_slices, dim=2)
            layer.slots.beside[SCALE] = tuple(of_slices)
            layer.register_forward_hook(self.scale)

    # ---- of an adapter --------------------------------------------------------------------------------------

    def scales(
        self, name: str, parts: Sequence[LoRALayerWeights | None], magnitudes: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """scale - 1 of each part that is there, (1, N_i) on a CPU; B has its scaling already.

        |W + BA|^2 = |W|^2 + 2 (W A^T) B + (B A A^T) B, row by row: W enters by a product, so that a weight which a CPU
        has reordered, or int8, counts as what the layer computes with. At least in float32.

        ValueError names a module whose rows have no length.
        """
        layer = self.layers[name]
        there = [i for i, part in enumerate(parts) if part is not None]
        if parts[there[0]].lora_a.is_meta:
            return [magnitudes[i] for i in there]
        base = layer.base_layer
        squares = self._squares_of(name, base)  # (N,)
        a = [parts[i].lora_a.to(squares) for i in there]
        products = products_with_weight(base, torch.cat(a)).split([len(each) for each in a])  # (r_i, N) each
        columns = list(pairwise(accumulate(layer.output_slices, initial=0)))
        found = []
        for i, lora_a, product in zip(there, a, products):
            own, lora_b = slice(*columns[i]), parts[i].lora_b.to(squares)  # (N_i, r)
            across = (product[:, own].t() * lora_b).sum(1)
            within = (lora_b @ (lora_a @ lora_a.t()) * lora_b).sum(1)
            lengths = (squares[own] + 2 * across + within).clamp(min=0).sqrt()  # (N_i,)
            scale = magnitudes[i].to(squares) / lengths
            if not scale.isfinite().all():
                raise ValueError(
                    f"{parts[i].module_name} has rows of W + s B A that are zero, to which DoRA gives no length"
                )
            found.append((scale - 1).to("cpu", parts[i].lora_b.dtype))
        return found

    def _squares_of(self, name: str, base: LinearBase) -> torch.Tensor:
        if name not in self._squares:
            self._squares[name] = squared_lengths(base)
        return self._squares[name]

    # ---- of a step ------------------------------------------------------------------------------------------

    def scale(
        self, layer: BaseLinearLayerWithLoRA, inputs: Any, output: tuple[torch.Tensor, None]
    ) -> tuple[torch.Tensor, None]:
        """y += (scale - 1) * (y - bias), each row's own scales, in place.   y: (T, N)

        Two launches on a GPU, because a step of decodes has four such linears in each layer and waits for each launch.
        """
        y, backend, bias = output[0], layer.backend, layer.bias
        if backend.no_lora or not (self.has_scales or y.is_cuda):
            return output
        own = self._tables[layer][backend.token_slots(len(y))]  # (T, N)
        y.addcmul_(own, y if bias is None else y - bias)
        return output


def products_with_weight(base: LinearBase, x: torch.Tensor) -> torch.Tensor:
    """x W^T, without the bias, in x's dtype.   x: (rows, K) -> (rows, N)"""
    if base.packed_weight is not None:
        y = base.forward(x)[0]
        return y if base.bias is None else y - base.bias
    rows = full_weight(base).split(AT_A_TIME)
    return torch.cat([x @ of_weight.to(x.dtype).t() for of_weight in rows], dim=1)


def squared_lengths(base: LinearBase) -> torch.Tensor:
    """|row of W|^2, at least in float32: (N,)"""
    if base.packed_weight is None:
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        return torch.cat([rows.to(dtype).square().sum(1) for rows in full_weight(base).split(AT_A_TIME)])
    # Nobody has the weight any more, but for what it makes of unit vectors.
    squares = 0
    for units in torch.eye(base.input_size, dtype=torch.float32).split(AT_A_TIME):
        squares = squares + products_with_weight(base, units).square().sum(0)
    return squares


def full_weight(base: LinearBase) -> torch.Tensor:
    """W (N, K) in floats, also where it is int8."""
    return base.weight if type(base.weight) is nn.Parameter else base.weight.dequantize()
