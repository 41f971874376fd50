"""What every wrapped layer can do. Stands for vllm/lora/layers/base.py and base_linear.py (v0.22.1)."""

from collections.abc import Sequence
from copy import copy
from typing import ClassVar

import torch
from torch import nn

from minivllm.config import LoRAConfig
from minivllm.lora import seams
from minivllm.lora.backend import Backend
from minivllm.lora.layers.vllm_names import VllmNames
from minivllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from minivllm.lora.slots import Slots

LayerWeights = LoRALayerWeights | PackedLoRALayerWeights


class BaseLayerWithLoRA(VllmNames, nn.Module):
    """A base layer with room for S adapters. vLLM: `BaseLayerWithLoRA`.

    Layers are wrapped once, when the model is loaded. From then on adapters come and go by writing slots. A layer
    judges, packs and writes its own weights; what they add is the backend's to compute.

    part_sizes      K_i and N_i of each slice, of which there are n
    slots           its `Slots`, once `create_lora_weights` was called
    backend         what does the arithmetic, once `set_mapping` was called
    targets         what adapters may call a slice -> its number; other names stand for the whole of a fused layer
    in_cuda_graphs  whether a step that runs the layer may be captured
    tables          what the layer has allocated beside slots
    """

    in_cuda_graphs: ClassVar[bool] = True

    def __init__(self, base_layer: nn.Module, part_sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.base_layer = base_layer
        # Read at every step: from here at once, as a submodule only after a search.
        self.__dict__["base_layer"] = base_layer
        self.part_sizes = list(part_sizes)
        self.slots: Slots | None = None
        self.backend: Backend | None = None
        self.targets: dict[str, int] = {}
        self.max_rank = 0

    @property
    def n_slices(self) -> int:
        return len(self.part_sizes)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        return ()

    def part_shape(self, part: int) -> tuple[int, int]:
        """How wide A, and how tall B, of a slice must be: K_i, N_i."""
        return self.part_sizes[part]

    # ---- an adapter's weights -------------------------------------------------------------------------------

    # region lab 2.6: refuse an adapter that does not fit
    def accept(self, found: dict[str, LoRALayerWeights]) -> LayerWeights:
        """What an adapter has for this layer, in the form in which slots take it; `found` stays as it is.

        found   name of a slice (`targets`) or of the whole of a fused layer -> weights, perhaps shapes only (meta)

        `by_slice` gives one entry a slice, None where there is nothing. Each is judged (`refuse_misfit`) before
        `pack` puts copies of all together: it changes them.
        """
        parts = self.by_slice(found)
        for i, weights in enumerate(parts):
            if weights is not None:
                self.refuse_misfit(weights, *self.part_sizes[i % self.n_slices])  # experts have n parts each
        return self.pack([copy(weights) for weights in parts])

    def refuse_misfit(self, weights: LoRALayerWeights, width: int, height: int) -> None:
        """ValueError, naming the module, unless the rank is `max_rank` at most, A is (r, width) and B (height, r).

        For a rank the message has `max_lora_rank` and the option `--max-lora-rank r` that would admit it; for A and
        B the shapes that they have and should have, as tuples. What is beside A and B `_refuse_beside` judges.
        """
        self._refuse_beside(weights)
        name, rank = weights.module_name, weights.lora_a.shape[0]
        if rank > self.max_rank:
            raise ValueError(
                f"{name} has rank {rank}, which is greater than max_lora_rank {self.max_rank}; "
                f"pass --max-lora-rank {rank}"
            )
        found = tuple(weights.lora_a.shape), tuple(weights.lora_b.shape)
        expected = (rank, width), (height, rank)
        if found != expected:
            raise ValueError(
                f"{name} has lora_A {found[0]} and lora_B {found[1]}, expected {expected[0]} and {expected[1]}"
            )

    # endregion

    def _refuse_beside(self, weights: LoRALayerWeights) -> None:
        for name in weights.beside:
            seams.beside_checks[name](self, weights)

    def by_slice(self, found: dict[str, LoRALayerWeights]) -> list[LoRALayerWeights | None]:
        """One entry a slice: an adapter for all of a fused layer has one A, and gives each slice a piece of its B.

        ValueError where the adapter has both, or its B is not as tall as the layer.
        """
        whole = next((name for name in found if name not in self.targets), None)
        if whole is not None:
            if also := [name for name in found if name in self.targets]:
                raise ValueError(
                    f"the adapter has weights for {whole} and for {', '.join(also)}, a part of it; give either"
                )
            heights = [height for _, height in self.part_sizes]
            return found[whole].split(list(self.targets)[: self.n_slices] or [whole] * self.n_slices, heights)
        parts: list[LoRALayerWeights | None] = [None] * self.n_slices
        for name, weights in found.items():
            parts[self.targets[name]] = weights
        return parts

    def pack(self, parts: list[LoRALayerWeights | None]) -> LayerWeights:
        """All slices in one, with the scaling folded into B."""
        return PackedLoRALayerWeights.pack(parts) if len(parts) > 1 else parts[0].optimize()

    def also_called(self, name: str) -> list[str]:
        """Further names under which adapters may have weights for the layer `name`."""
        return [] if name in self.targets else [name]

    def write(self, slot: int, weights: LayerWeights) -> None:
        """Put what `accept` gave into a slot."""
        self.slots.write(slot, weights.parts)

    def written(self, slot: int, weights: LayerWeights | None) -> None:
        """Somebody else has put this into a slot, or nothing."""
        parts = [None] * self.n_slices if weights is None else weights.parts
        self.slots.written(slot, [0 if part is None else part.lora_a.shape[-2] for part in parts])

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.slots.clear(slot)

    # ---- being wrapped --------------------------------------------------------------------------------------

    @classmethod
    def takes(cls, layer: nn.Module, parts: int) -> bool:
        """Whether this class wraps that layer, of which a checkpoint names so many parts one by one."""
        raise NotImplementedError

    @classmethod
    def parts_in(cls, model: nn.Module, name: str, layer: nn.Module) -> list[str] | None:
        """Of options' wrappers: ends of what adapters call the parts of a model's layer, [] if only the layer has a
        name; None where the layer is not this class's."""
        raise NotImplementedError

    @classmethod
    def around(
        cls, model: nn.Module, name: str, layer: nn.Module, max_loras: int, lora_config: LoRAConfig
    ) -> "BaseLayerWithLoRA":
        """Of options' wrappers: what stands in the place of the model's layer (`place_of`), with empty slots."""
        wrapped = cls(layer)
        wrapped.create_lora_weights(max_loras, lora_config)
        return wrapped

    @classmethod
    def place_of(cls, name: str) -> str:
        """Where in the model the wrapper of the layer `name` stands."""
        return name

    def create_lora_weights(
        self, max_loras: int, lora_config: LoRAConfig, model_config: object | None = None
    ) -> None:
        """Allocate the slots, all empty, on the base weight's device."""
        weight, self.max_rank = self.base_layer.weight, lora_config.max_lora_rank
        dtype = lora_config.slot_dtype(weight.dtype)
        self.slots = Slots.empty(max_loras, self.max_rank, self.part_sizes, dtype, weight.device)

    def set_mapping(self, punica_wrapper: Backend) -> None:
        """Hand the slots to the backend that does the arithmetic, which may move them."""
        self.backend = punica_wrapper
        self.slots = punica_wrapper.place(self.slots, None)
