"""What every wrapped layer can do. Stands for vllm/lora/layers/base.py and base_linear.py (v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Sequence
from itertools import cycle
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.layers.linear import LinearBase
from minivllm.layers.ranks import EVERYTHING, Share
from minivllm.lora.backend import Backend
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.slots import Slots

LayerWeights = LoRALayerWeights | PackedLoRALayerWeights
Parts = list[LoRALayerWeights | None]  # of a layer, one entry a slice
Sides = list[torch.Tensor | None]  # A or B of each slice, None where it has no adapter


class BaseLayerWithLoRA(nn.Module):
    """A base layer with room for S adapters. vLLM: `BaseLayerWithLoRA`.

    Layers are wrapped once, when the model is loaded. From then on adapters come and go by writing slots. A layer
    judges, packs and writes its own weights; what they add is the backend's to compute.

    slice_sizes     K_i and N_i of each slice, of which there are n
    targets         what adapters may call a slice -> its number; other names stand for the whole of a fused layer
    max_rank        R
    share           which part of each A and B this process has, of processes that share the layer
    slots           its `Slots`, once `create_lora_weights` was called
    backend         what does the arithmetic, once `set_mapping` was called
    """

    share: Share = EVERYTHING

    def __init__(self, base_layer: nn.Module, slice_sizes: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.slice_sizes = list(slice_sizes)
        self.slots: Slots | None = None
        self.backend: Backend | None = None
        self.targets: dict[str, int] = {}
        self.max_rank = 0

    weight = property(attrgetter("base_layer.weight"))
    lora_a_stacked = property(attrgetter("slots.a"))
    lora_b_stacked = property(attrgetter("slots.b"))
    punica_wrapper = property(attrgetter("backend"))  # vLLM's name

    def part_shape(self, part: int) -> tuple[int, int]:
        """How wide the A of a part must be, and how tall its B."""
        return self.slice_sizes[part]

    # ---- which weights fit, and their form in slots ----------------------------------------------------------

    @property
    def n_slices(self) -> int:
        return len(self.slice_sizes)

    # region lab 2.6: refuse an adapter that does not fit
    def judge(self, found: dict[str, LoRALayerWeights]) -> Parts:
        """What an adapter has for each slice (`by_slice`), None where there is nothing; `found` stays as it is.

        found   name of a slice (`targets`) or of the whole of a fused layer -> weights, perhaps shapes only (meta)

        ValueError as in `refuse_misfit`, which looks at each, given K and N of its slice.
        """
        raise Todo("lab 2.6: refuse an adapter that does not fit")

    def refuse_misfit(self, weights: LoRALayerWeights, width: int, height: int) -> None:
        """ValueError, naming the module, unless the rank is `max_rank` at most, A is (r, width) and B (height, r).

        For a rank the message has `max_lora_rank`, and the option `--max-lora-rank r` that would admit it. For A and
        B it has their shapes and those expected, as tuples. What is beside A and B its option judges.
        """
        raise Todo("lab 2.6: refuse an adapter that does not fit")

    # endregion

    def by_slice(self, found: dict[str, LoRALayerWeights]) -> Parts:
        """One entry a slice. An adapter for a whole fused layer is split: every slice gets its A, and rows of its B.

        ValueError for weights of the whole beside those of a slice, or for a B of another height.
        """
        whole = next((name for name in found if name not in self.targets), None)
        if whole is not None:
            if also := [name for name in found if name in self.targets]:
                raise ValueError(
                    f"the adapter has weights for {whole} and for {', '.join(also)}, a part of it; give either"
                )
            heights = [height for _, height in self.slice_sizes]
            # The first n targets are those of the layer's first name, in the order of slices; there may be none.
            names = list(self.targets)[: self.n_slices] or [whole] * self.n_slices
            return found[whole].split(names, heights)
        parts: Parts = [None] * len(self.slice_sizes)
        for name, weights in found.items():
            parts[self.targets[name]] = weights
        return parts

    def pack(self, parts: Parts) -> LayerWeights:
        """What `judge` gave in the form in which slots take it: all slices in one, the scaling folded into B."""
        return PackedLoRALayerWeights.pack(parts) if len(parts) > 1 else parts[0].optimize()

    # ---- an adapter's weights -------------------------------------------------------------------------------

    def also_called(self, name: str) -> list[str]:
        """Further names under which adapters may have weights for the layer `name`."""
        return [] if name in self.targets else [name]

    def write(self, slot: int, weights: LayerWeights) -> None:
        """Put what `pack` gave into a slot."""
        self.slots.write(slot, weights.parts)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.slots.clear(slot)

    def set_lora(self, index: int, lora_a: object, lora_b: object) -> None:
        """`write`, of A (r, K) and B (N_i, r), or lists of n, None where a slice has no adapter. vLLM's name."""
        sides = self.slice_lora_a(as_list(lora_a)), self.slice_lora_b(as_list(lora_b))
        parts = [
            None if a is None or b is None else LoRALayerWeights("", a.shape[-2], 1, a, b, 1)
            for a, b in zip(*sides, strict=True)
        ]
        self.write(index, PackedLoRALayerWeights.from_parts("", 0, parts))

    def reset_lora(self, index: int) -> None:
        """`clear`. vLLM: the same name."""
        self.clear(index)

    def slice_lora_a(self, lora_a: Sides | torch.Tensor) -> Sides | torch.Tensor:
        """This rank's part of each A; of one A for a layer of one slice, as it came. vLLM: the same name."""
        if not isinstance(lora_a, list):
            return self.share.of_a(0, lora_a)
        return [None if a is None else self.share.of_a(i, a) for i, a in enumerate(lora_a)]

    def slice_lora_b(self, lora_b: Sides | torch.Tensor) -> Sides | torch.Tensor:
        """This rank's part of each B, likewise. vLLM: the same name."""
        if not isinstance(lora_b, list):
            return self.share.of_b(0, lora_b)
        return [None if b is None else self.share.of_b(i, b) for i, b in enumerate(lora_b)]

    # ---- being wrapped --------------------------------------------------------------------------------------

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """`takes`. vLLM: the same name."""
        return cls.takes(source_layer, len(packed_modules_list))

    @classmethod
    def place_of(cls, name: str) -> str:
        """Where in the model the wrapper of the layer `name` stands."""
        return name

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty, on the base weight's device."""
        weight, self.max_rank = self.base_layer.weight, lora_config.max_lora_rank
        sizes, dtype = self.share.sizes(self.slice_sizes), lora_config.slot_dtype(weight.dtype)
        self.slots = Slots.empty(max_loras, self.max_rank, sizes, dtype, weight.device)

    def set_mapping(self, punica_wrapper: Backend) -> None:
        """Hand the slots to the backend that does the arithmetic, which may move them."""
        self.backend = punica_wrapper
        self.slots = punica_wrapper.place(self.slots, None)


class LinearArithmetic:
    """How a wrapped linear computes: its base layer and slots by the backend, which no process need meet for.

    vLLM's classes for fully sharded adapters have another one (options/fully_sharded.py).

    base_layer  the linear, and tp the processes that share it
    slots       with `share` and `max_rank` as the wrapped layer has them, from `cut_slots` on
    backend     from `place` on
    """

    def __init__(self, base_layer: LinearBase) -> None:
        self.base_layer, self.tp = base_layer, base_layer.tp
        self.slots: Slots | None = None
        self.backend: Backend | None = None
        self.max_rank = 0

    @classmethod
    def is_for(cls, lora_config: LoRAConfig, layer: LinearBase) -> bool:
        """Whether a layer may compute so: not one that ranks share, where they are to share out both A and B."""
        here = layer.output_size_per_partition, layer.input_size_per_partition
        return not lora_config.fully_sharded_loras or here == (layer.output_size, layer.input_size)

    def share_of(self, share: Share) -> Share:
        """Which part of each A and B this process has, of a linear with that share."""
        return share

    def cut_slots(self, slots: Slots, share: Share, max_rank: int) -> tuple[Slots, Share]:
        """New slots as far as they are this process's, and its share of them."""
        self.slots, self.share, self.max_rank = slots, share, max_rank
        return slots, share

    def place(self, slots: Slots, share: Share, backend: Backend) -> tuple[Slots, Share]:
        """The same where the backend wants them."""
        self.backend = backend
        self.slots, self.share = backend.place(slots, self.base_layer), share
        return self.slots, share

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As the layer's."""
        return self.backend.linear(input_, self.base_layer, self.slots), None

    def forward_deferred(self, x: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """As the layer's."""
        return self.backend.linear_deferred(x, self.base_layer, self.slots)


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    """A base linear with room for S adapters. vLLM: `BaseLinearLayerWithLoRA`.

    output_slices  widths N_i of the projections that the layer fuses, as far as they are this process's
    wraps          kinds of base layer it is for -> parts the checkpoint must name, None = any number
    arithmetic     how it computes: an object of its class's `arithmetic_class`
    """

    wraps: ClassVar[dict[type[LinearBase], int | None]] = {}
    arithmetic_class: ClassVar[type[LinearArithmetic]] = LinearArithmetic

    def __init__(self, base_layer: LinearBase) -> None:
        sizes = [(base_layer.input_size, width) for width in self._slice_widths(base_layer)]
        super().__init__(base_layer, sizes)
        self.share = base_layer.tp.adapter_share(base_layer, len(sizes))
        self.output_slices = tuple(width for _, width in self.share.sizes(sizes))
        self.input_size, self.output_size = base_layer.input_size_per_partition, sum(self.output_slices)
        self.arithmetic = self.arithmetic_class(base_layer)
        self.share = self.arithmetic.share_of(self.share)

    bias = property(attrgetter("base_layer.bias"))
    tp_size = property(attrgetter("base_layer.tp_size"))
    tp_rank = property(attrgetter("base_layer.tp_rank"))

    @classmethod
    def can_replace_layer(
        cls,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: object | None = None,
    ) -> bool:
        """`takes`, where the configuration wants what this class computes. vLLM: the same name."""
        is_ours = cls.takes(source_layer, len(packed_modules_list))
        return is_ours and cls.arithmetic_class.is_for(lora_config, source_layer)

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)
        self.slots, self.share = self.arithmetic.cut_slots(self.slots, self.share, self.max_rank)

    def set_mapping(self, punica_wrapper: Backend) -> None:
        self.backend = punica_wrapper
        self.slots, self.share = self.arithmetic.place(self.slots, self.share, punica_wrapper)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Base output plus each row's own adapter, in the base layer's form.   input_: (T, K) -> (T, N), None"""
        return self.arithmetic.forward(input_)

    def forward_deferred(self, x: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """As `forward`, but what adapters add may be left to a kernel that reads y: y (T, N), and the backend's update.

        None for the update says that y has it already. A layer with a forward pass of its own overrides both.
        """
        return self.arithmetic.forward_deferred(x)

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


def as_list(weights: object) -> Sides:
    """One entry a slice."""
    return weights if isinstance(weights, list) else [weights]
