"""The A and B of one module, alone or packed. Stands for vllm/lora/lora_weights.py (v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch

from minivllm.lora.module_weights import LoRALayerWeights

__all__ = ["LoRALayerWeights", "PackedLoRALayerWeights"]


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
        """Put the parts of a fused module side by side, each with its own A, B, rank and alpha.

        loras   one entry a slice, in their order; None where the adapter leaves it alone, but not for all. Each is
                optimized: what is packed needs no scaling any more.

        The result is named after the first part that is there. Its rank is what a slot must have room for.

        To use: `module_name`, `rank` and `optimize` of a part (module_weights.py), `from_parts`.
        """
        raise Todo("lab 1.5: pack the parts of a fused module")

    # endregion

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
