"""From magnitudes to scales of a linear's outputs. In PEFT `DoraLinearLayer` (peft/tuners/lora/dora.py, 0.21.2).

With the weight W, an adapter's s B A and its magnitude m, DoRA's weight has rows of length m in the directions of those
of W + s B A.
"""

from labs.kit.overlay import Todo
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
        self._rooms: dict[BaseLinearLayerWithLoRA, Any] = {}  # what `_make_room` gave
        for layer in layers.values():
            self._rooms[layer] = self._make_room(layer)
            layer.register_forward_hook(self.scale)

    # ---- of an adapter --------------------------------------------------------------------------------------

    # region lab 12.3: from lengths to scales
    def scales(
        self, name: str, parts: Sequence[LoRALayerWeights | None], magnitudes: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """scale - 1 of each part that is there, (1, N_i) in B's dtype on a CPU.

        name        the module's
        parts       of each slice of the layer, with A (r_i, K) and B (N_i, r_i), which has its scaling already; None
                    where the adapter leaves a slice alone
        magnitudes  (1, N_i) of each part

        It is worked out at least in float32. A layer may have its weight in int8, or only as a CPU has reordered it
        (`packed_weight`): then W is what the layer computes with. Of parts on the meta device it gives the magnitudes.

        ValueError names a part that has a row of no length.

        To use: `base_layer` and `output_slices` (the N_i) of the layer, which is one of `self.layers`;
        `self._squares_of`; `products_with_weight`, which takes any rows (r, K).
        """
        raise Todo("lab 12.3: from lengths to scales")

    # endregion

    def _squares_of(self, name: str, base: LinearBase) -> torch.Tensor:
        """`squared_lengths` of a module's base layer, (N,), worked out once."""
        if name not in self._squares:
            self._squares[name] = squared_lengths(base)
        return self._squares[name]

    # ---- of a step ------------------------------------------------------------------------------------------

    # region lab 12.4: scales on outputs
    def _make_room(self, layer: BaseLinearLayerWithLoRA) -> Any:
        """Give a layer's slots n tables (S, 1, N_i) of zeros under SCALE, in their dtype, where the weight is.

        Adapters' scales - 1 are written there. It returns what `scale` finds in `_rooms`.

        To use: `slots` (with `beside`, and `b` for count and dtype), `output_slices` (the N_i) and `weight` of the
        layer.
        """
        raise Todo("lab 12.4: scales on outputs")

    def scale(
        self, layer: BaseLinearLayerWithLoRA, inputs: Any, output: tuple[torch.Tensor, None]
    ) -> tuple[torch.Tensor, None]:
        """Runs behind the layer's product, and makes of each row's output what it is with its adapter's scales.

        output   (y, None), where y (T, N) has base layer, its bias and adapters in it. It is changed in place, and
                 returned

        Rows of the base model, and of adapters without scales, stay what they are. Where no adapter in a slot has any,
        a CPU computes nothing; a GPU always does, because a captured step runs for all batches. It should take few
        launches there: a step of decodes has four such linears in each layer, and waits for each launch.

        To use: `backend` (`no_lora`, `token_slots`) and `bias` of the layer, and what you made of `self._rooms[layer]`.
        """
        raise Todo("lab 12.4: scales on outputs")

    # endregion


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
