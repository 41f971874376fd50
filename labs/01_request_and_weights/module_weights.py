"""The A and B of one module. Stands for half of vllm/lora/lora_weights.py (v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Callable, Sequence
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
    beside        what an option found beside A and B, by the option's name, ready for a slot: (rows, columns) each
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
        """Multiply B by the scaling, so that no forward pass has to, and return self.

        Doing it again changes nothing. B is replaced, not written to: whoever read it from a file may still hold it.
        """
        raise Todo("lab 1.4: fold the scaling into B, once")

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
