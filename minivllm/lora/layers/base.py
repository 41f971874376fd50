"""What every wrapped layer can do. Stands for vllm/lora/layers/base.py and base_linear.py (v0.22.1)."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.distributed.adapter_share import EVERYTHING, Share
from minivllm.lora.backend import Backend
from minivllm.lora.layers.accepting import AcceptsWeights, LayerWeights
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.slots import Slots

Sides = list[torch.Tensor | None]  # A or B of each slice, None where it has no adapter


class BaseLayerWithLoRA(AcceptsWeights, nn.Module):
    """A base layer with room for S adapters. vLLM: `BaseLayerWithLoRA`.

    Layers are wrapped once, when the model is loaded. From then on adapters come and go by writing slots. A layer
    judges, packs and writes its own weights; what they add is the backend's to compute.

    slice_sizes     K_i and N_i of each slice, of which there are n
    share           which part of each A and B this process has, of processes that share the layer
    slots           its `Slots`, once `create_lora_weights` was called
    backend         what does the arithmetic, once `set_mapping` was called
    """

    share: Share = EVERYTHING

    def __init__(self, base_layer: nn.Module, slice_sizes: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__()
        self.base_layer = base_layer
        # Read at every step: an attribute is found at once, a submodule only after a search.
        self.__dict__["base_layer"] = base_layer
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


def as_list(weights: object) -> Sides:
    """One entry a slice."""
    return weights if isinstance(weights, list) else [weights]
