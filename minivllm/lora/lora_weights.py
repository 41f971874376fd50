"""The A and B of one module, alone or packed. Stands for vllm/lora/lora_weights.py (v0.22.1)."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch

from minivllm.lora.peft_helper import PEFTHelper


@dataclass(eq=False)
class LoRALayerWeights:
    """One module's adapter weights, by the name that the model has for it. vLLM: `LoRALayerWeights`.

    rank          r, the rows of A and the columns of B
    lora_alpha    what the module was trained with; counts only while no `scaling` is given
    lora_a        (r, K) as PEFT stores it, no transpose; None until it is read
    lora_b        (N, r) likewise
    scaling       factor on B·A that is not yet in B; 1 once `optimize` has folded it. None = lora_alpha / rank
    beside        what the adapter has for the module beside A and B, such as a bias: name of the option that found it
                  -> tensor (rows, columns), ready for a slot; {} for a plain adapter
    """

    is_packed: ClassVar[bool] = False  # vLLM: the same name

    module_name: str
    rank: int
    lora_alpha: float
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    scaling: float | None = None
    beside: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scaling is None:
            self.scaling = self.lora_alpha / self.rank

    # region lab 1.4: fold the scaling into B, once
    def optimize(self) -> Self:
        """These weights, with a scaling of 1 and the same product as before, however often it is called.

        Others may hold the same tensors.
        """
        if self.scaling != 1:
            self.lora_b = self.lora_b * self.scaling  # (N, r)
            self.scaling = 1
        return self

    # endregion

    @property
    def input_dim(self) -> int:
        return self.lora_a.shape[1]

    @property
    def output_dim(self) -> int:
        return self.lora_b.shape[0]

    @property
    def parts(self) -> list["LoRALayerWeights"]:
        """One entry a slice: a module that is not fused has one."""
        return [self]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.lora_a, self.lora_b, *self.beside.values()]

    def replace_tensors(self, replaced: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put `replaced(tensor)` in the place of every tensor."""
        self.lora_a, self.lora_b = replaced(self.lora_a), replaced(self.lora_b)
        self.beside = {name: replaced(tensor) for name, tensor in self.beside.items()}

    def split(self, names: Sequence[str], heights: Sequence[int]) -> list["LoRALayerWeights"]:
        """One for each of several slices: A is shared, and B (ΣN, r) is split into their heights N.

        ValueError where B is not as tall as all of them."""
        if len(self.lora_b) != sum(heights):
            raise ValueError(
                f"{self.module_name} has lora_B {tuple(self.lora_b.shape)}, expected {(sum(heights), self.rank)}"
            )
        parts = [replace(self, module_name=n, lora_b=b) for n, b in zip(names, self.lora_b.split(heights))]
        for i, part in enumerate(parts):
            part.beside = {kind: t.split(heights, dim=1)[i] for kind, t in self.beside.items()}  # (1, N)
        return parts

    @classmethod
    def create_dummy_lora_weights(
        cls, module_name: str, input_dim: int, output_dim: int, rank: int, dtype: torch.dtype, device: str
    ) -> Self:
        """Zeros of the right shape, for warm-up: they cost what a real adapter costs and change nothing."""
        lora_a = torch.zeros(rank, input_dim, dtype=dtype, device=device)
        lora_b = torch.zeros(output_dim, rank, dtype=dtype, device=device)
        return cls(module_name, rank, 1, lora_a, lora_b, scaling=1)

    @classmethod
    def from_config(cls, module_name: str, peft_helper: PEFTHelper, rank: int | None = None) -> Self:
        """Without tensors yet, with the config's alpha and scaling. The config knows Hugging Face's module names.

        rank   of the module's tensors, None = the config's r
        """
        rank, pattern_name = rank or peft_helper.r, peft_helper.pattern_name(module_name)
        scaling = peft_helper.scaling(pattern_name, rank)
        return cls(module_name, rank, peft_helper.alpha(pattern_name), None, None, scaling)


class PackedLoRALayerWeights:
    """The adapters of the parts of a fused module, e.g. q, k and v of qkv_proj. vLLM: the same name.

    rank    the largest of the parts'; each part keeps its own
    parts   one entry a slice, None where the adapter leaves that slice alone. A part of E experts has A (E, r, K)
            and B (E, N, r)

    vLLM stores four lists, `lora_alphas`, `lora_a`, `lora_b` and `scaling`; here they are made of the parts.
    """

    is_packed: ClassVar[bool] = True  # vLLM: the same name
    lora_alphas = property(lambda self: [part and part.lora_alpha for part in self.parts])
    lora_a = property(lambda self: [part and part.lora_a for part in self.parts])
    lora_b = property(lambda self: [part and part.lora_b for part in self.parts])
    scaling = property(lambda self: [part and part.scaling for part in self.parts])

    def __init__(
        self,
        module_name: str,
        rank: int,
        lora_alphas: Sequence[float | None],
        lora_a: Sequence[torch.Tensor | None],
        lora_b: Sequence[torch.Tensor | None],
        scaling: Sequence[float | None] | None = None,
    ) -> None:
        self.module_name = module_name
        self.rank = rank
        # A scaling that is not given goes by the part's own rank. By the largest it would be too small.
        self.parts: list[LoRALayerWeights | None] = [
            None if a is None else LoRALayerWeights(module_name, a.shape[-2], alpha, a, b, factor)
            for alpha, a, b, factor in zip(lora_alphas, lora_a, lora_b, scaling or [None] * len(lora_a))
        ]

    @classmethod
    def from_parts(cls, module_name: str, rank: int, parts: Sequence[LoRALayerWeights | None]) -> Self:
        """These parts side by side, as they are."""
        packed = cls(module_name, rank, [], [], [])
        packed.parts = list(parts)
        return packed

    # region lab 1.5: pack the parts of a fused module
    @classmethod
    def pack(cls, loras: Sequence[LoRALayerWeights | None]) -> Self:
        """The parts of a fused module side by side, ready for a slot: there is nothing left to scale.

        loras   one entry a slice, in their order; None where the adapter leaves it alone, but not for all

        B·A of each slice is what scaling·B·A of its part was, and has its rank, its alpha and what is beside it. The
        result is named after the first part that is there; its `rank` is what a slot must have room for.

        The parts stay as they are, since other threads may read them, and what is done with the result later
        (`replace_tensors`) is not done with them. No memory is new but for a B that had to be scaled.

        By hand, q of rank 2 and scaling 4, v of rank 8 and scaling 1, K = N = 100: pack([q, None, v]) has three slices,
        the second of them None, and rank 8; 200 numbers are new.
        To work out: somebody computes scaling·B·A of q between the two assignments in `optimize`. What is it then?
        """
        parts = [lora and replace(lora, beside=dict(lora.beside)).optimize() for lora in loras]
        # They are objects of our own over the same tensors; `optimize` gave them another B and left the loras theirs.
        present = [part for part in parts if part is not None]
        rank = max(part.rank for part in present)
        return cls.from_parts(present[0].module_name, rank, parts)

    # endregion

    @staticmethod
    def pack_moe(
        loras: Sequence[LoRALayerWeights | None], module_name: str, is_non_gated_moe: bool = False
    ) -> "PackedLoRALayerWeights":
        """The adapters of a layer's experts, see the function `pack_moe`. vLLM: the same name."""
        return pack_moe(loras, module_name, is_non_gated_moe)

    def optimize(self) -> Self:
        """Fold the scaling of each part into its B."""
        for part in filter(None, self.parts):
            part.optimize()
        return self

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for part in filter(None, self.parts) for tensor in part.tensors]

    def replace_tensors(self, replaced: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """As for one module, part by part."""
        for part in filter(None, self.parts):
            part.replace_tensors(replaced)


# region lab 1.7: pack the experts of a layer
def pack_moe(
    loras: Sequence[LoRALayerWeights | None], module_name: str, is_non_gated_moe: bool = False
) -> PackedLoRALayerWeights:
    """Stack what the E experts of a layer have, part by part: A (E, r, K) and B (E, N, r) of [w1, w2, w3].

    loras             w1, w2, w3 (gate, down, up) of expert 0, then of expert 1, and so on; None for what has no
                      adapter, but not for all
    module_name       of the result
    is_non_gated_moe  experts have no up: the third part, which nobody reads, is the first one's tensors, scaling 1.
                      It is None where the first one is, and an adapter on an up is left out

    A part keeps the scaling that its experts share, for `optimize` to fold in. Where they differ each expert is
    optimized first, and the part's scaling is 1. A part that no expert has is None. `rank` is the largest of all.
    vLLM: `PackedLoRALayerWeights.pack_moe`.

    Raises ValueError, naming the module, for a length that is no multiple of 3, and where nothing has an adapter.
    """
    if is_non_gated_moe:
        loras = [None if i % 3 == 2 else lora for i, lora in enumerate(loras)]
    if len(loras) % 3 or all(lora is None for lora in loras):
        raise ValueError(
            f"{module_name}: expected w1, w2 and w3 of each expert, at least one of them with an adapter, got "
            f"{len(loras)} parts, {sum(lora is not None for lora in loras)} of them with an adapter"
        )
    parts = [_stack_experts(loras[part::3]) for part in range(3)]
    if is_non_gated_moe and parts[0] is not None:
        parts[2] = copy(parts[0])
        parts[2].scaling = 1
    rank = max(part.rank for part in parts if part is not None)
    return PackedLoRALayerWeights.from_parts(module_name, rank, parts)


def _stack_experts(loras: Sequence[LoRALayerWeights | None]) -> LoRALayerWeights | None:
    """One part of all experts in one: A (E, r, K), B (E, N, r), None where no expert has it.

    r is the largest rank of any of them. Past an expert's own rank there are zeros, and so there are for an expert
    that lacks the part. Alpha is the first one's, and so is the scaling, once it is all experts'.
    """
    present = {expert: lora for expert, lora in enumerate(loras) if lora is not None}
    if not present:
        return None
    if len({lora.scaling for lora in present.values()}) > 1:
        present = {expert: lora.optimize() for expert, lora in present.items()}
    first, rank = next(iter(present.values())), max(len(lora.lora_a) for lora in present.values())
    lora_a = first.lora_a.new_zeros(len(loras), rank, first.lora_a.shape[1])  # (E, r, K)
    lora_b = first.lora_b.new_zeros(len(loras), first.lora_b.shape[0], rank)  # (E, N, r)
    for expert, lora in present.items():
        lora_a[expert, : len(lora.lora_a)] = lora.lora_a
        lora_b[expert, :, : len(lora.lora_a)] = lora.lora_b
    return LoRALayerWeights(first.module_name, rank, first.lora_alpha, lora_a, lora_b, first.scaling)


# endregion
