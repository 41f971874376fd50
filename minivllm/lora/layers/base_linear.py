"""A linear with room for adapters, whatever its kind. Stands for vllm/lora/layers/base_linear.py (v0.22.1)."""

from operator import attrgetter
from typing import ClassVar

import torch
from torch import nn

from minivllm.distributed.adapter_share import share_of_linear
from minivllm.layers.linear import LinearBase
from minivllm.lora.backend import Backend
from minivllm.lora.layers.base import BaseLayerWithLoRA


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    """A base linear with room for S adapters. vLLM: `BaseLinearLayerWithLoRA`.

    output_slices  widths N_i of the projections that the layer fuses, as far as they are this process's
    wraps          kinds of base layer it is for -> parts the checkpoint must name, None = any number
    """

    wraps: ClassVar[dict[type[LinearBase], int | None]] = {}

    def __init__(self, base_layer: LinearBase) -> None:
        sizes = [(base_layer.input_size, width) for width in self._slice_widths(base_layer)]
        super().__init__(base_layer, sizes)
        self.share = share_of_linear(base_layer, len(sizes))
        self.output_slices = tuple(width for _, width in self.share.sizes(sizes))
        self.input_size, self.output_size = base_layer.input_size_per_partition, sum(self.output_slices)
        base_layer.is_complete = False  # `forward` sums terms once, with what adapters have added to each

    bias = property(attrgetter("base_layer.bias"))
    tp_size = property(attrgetter("base_layer.tp_size"))
    tp_rank = property(attrgetter("base_layer.tp_rank"))

    def set_mapping(self, punica_wrapper: Backend) -> None:
        self.backend = punica_wrapper
        self.slots = punica_wrapper.place(self.slots, self.base_layer)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Base output plus each row's own adapter, in the base layer's form.   input_: (T, K) -> (T, N), None"""
        return self.base_layer.complete(self.backend.linear(input_, self.base_layer, self.slots)), None

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        """Whether this class wraps that layer, as `wraps` says: its kind, and the number of parts for that kind.

        parts   how many parts of the layer a checkpoint names one by one

        Of exactly that kind: a model's own subclass may compute something else in its forward pass.
        """
        kind = type(layer)
        if kind not in cls.wraps:
            return False
        expected = cls.wraps[kind]
        return expected is None or expected == parts

    def _slice_widths(self, base_layer: LinearBase) -> tuple[int, ...]:
        """Widths N_i of the slices that adapters are written to.

        Where `wraps` asks for several parts of such a layer (kinds derived from it count), each has a slice. Their
        widths are the layer's `output_sizes`. Otherwise one slice is as wide as the layer: an adapter for all.
        """
        parts = next((n for kind, n in self.wraps.items() if isinstance(base_layer, kind)), None)
        if parts is None or parts == 1:
            return (base_layer.output_size,)
        return tuple(base_layer.output_sizes)
