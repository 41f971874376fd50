"""The A and B of one module, alone or packed. Stands for vllm/lora/lora_weights.py (v0.22.1)."""

from collections.abc import Callable, Sequence
from copy import copy

import torch

from minivllm.lora.peft_helper import PEFTHelper


class LoRALayerWeights:
    """One module's adapter weights. vLLM: `LoRALayerWeights`.

    module_name   as the model calls it
    rank          r, the rows of A and the columns of B
    lora_alpha    what the module was trained with; counts only while no `scaling` is given
    lora_a        (r, K) as PEFT stores it, no transpose; None until it is read
    lora_b        (N, r) likewise
    scaling       factor on B·A that is not yet in B; 1 once `optimize` has folded it. None = lora_alpha / rank
    bias          (1, N) a bias on B (PEFT's `lora_bias`), scaled like B; None for most
    embeddings_tensor  (tokens, H) of an embedding: of the tokens that the adapter adds; None for most
    """

    def __init__(
        self,
        module_name: str,
        rank: int,
        lora_alpha: float,
        lora_a: torch.Tensor | None,
        lora_b: torch.Tensor | None,
        scaling: float | None = None,
        bias: torch.Tensor | None = None,
        embeddings_tensor: torch.Tensor | None = None,
    ) -> None:
        self.module_name = module_name
        self.rank = rank
        self.lora_alpha = lora_alpha
        self.lora_a = lora_a
        self.lora_b = lora_b
        self.scaling = lora_alpha / rank if scaling is None else scaling
        self.bias = bias
        self.embeddings_tensor = embeddings_tensor

    # region lab 1.4: fold the scaling into B, once
    def optimize(self) -> "LoRALayerWeights":
        """Multiply B, and its bias if it has one, by the scaling, so that no forward pass has to, and return self.

        Doing it again changes nothing. B is replaced, not written to: whoever read it from a file may still hold it.
        """
        if self.scaling != 1:
            self.lora_b = self.lora_b * self.scaling  # (N, r)
            if self.bias is not None:
                self.bias = self.bias * self.scaling  # (1, N)
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
    def is_packed(self) -> bool:
        return False

    @property
    def extras(self) -> torch.Tensor | None:
        """What goes into a slot beside A and B, (rows, columns): a bias or embeddings; no module has both."""
        return self.bias if self.embeddings_tensor is None else self.embeddings_tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """A, B and what comes with them."""
        return [t for t in (self.lora_a, self.lora_b, self.extras) if t is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def replace_tensors(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put `replace(tensor)` in the place of every tensor."""
        for name in ("lora_a", "lora_b", "bias", "embeddings_tensor"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, replace(tensor))

    def split(self, names: Sequence[str], heights: Sequence[int]) -> list["LoRALayerWeights"]:
        """One adapter for several layers with the same input as one for each: A is shared, B (ΣN, r) is taken apart.

        heights: the N of each; ValueError where B is not as tall as all of them
        """
        if len(self.lora_b) != sum(heights):
            raise ValueError(
                f"{self.module_name} has lora_B {tuple(self.lora_b.shape)}, expected {(sum(heights), self.rank)}"
            )
        lora_bs = self.lora_b.split(heights)
        biases = [None] * len(names) if self.bias is None else self.bias.split(heights, dim=1)
        return [
            LoRALayerWeights(name, self.rank, self.lora_alpha, self.lora_a, lora_b, self.scaling, bias)
            for name, lora_b, bias in zip(names, lora_bs, biases)
        ]

    @classmethod
    def from_config(
        cls, module_name: str, peft_helper: PEFTHelper, rank: int | None = None
    ) -> "LoRALayerWeights":
        """Without tensors yet; alpha and scaling are the config's for this module.

        module_name   as Hugging Face names it, since the config's patterns do
        rank          of the module's tensors, None = the config's r
        """
        rank = peft_helper.r if rank is None else rank
        asked_by = peft_helper.name_in_patterns(module_name)
        scaling = peft_helper.scaling(asked_by, rank)
        return cls(module_name, rank, peft_helper.alpha(asked_by), None, None, scaling)

    @classmethod
    def create_dummy_lora_weights(
        cls,
        module_name: str,
        input_dim: int,
        output_dim: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "LoRALayerWeights":
        """Zeros of the right shape, for warm-up: they cost what a real adapter costs and change nothing."""
        lora_a = torch.zeros(rank, input_dim, dtype=dtype, device=device)
        lora_b = torch.zeros(output_dim, rank, dtype=dtype, device=device)
        return cls(module_name, rank, 1, lora_a, lora_b, scaling=1)


class PackedLoRALayerWeights(LoRALayerWeights):
    """The adapters of the parts of a fused module, e.g. q, k and v of qkv_proj. vLLM: the same name.

    lora_a, lora_b, scaling, bias and lora_alphas are lists with one entry a part, None where the adapter leaves that
    part alone. `rank` is the largest of the parts'; each A and B keeps its own. A part of E experts has A (E, r, K)
    and B (E, N, r).
    """

    def __init__(
        self,
        module_name: str,
        rank: int,
        lora_alphas: list[float | None],
        lora_a: list[torch.Tensor | None],
        lora_b: list[torch.Tensor | None],
        scaling: list[float | None] | None = None,
        bias: list[torch.Tensor | None] | None = None,
    ) -> None:
        if scaling is None:
            # Each part's own rank: the largest would make the scaling of the others too small.
            scaling = [
                None if a is None or alpha is None else alpha / len(a)
                for alpha, a in zip(lora_alphas, lora_a)
            ]
        super().__init__(module_name, rank, 0, lora_a, lora_b, scaling, bias or [None] * len(lora_a))
        self.lora_alphas = lora_alphas

    # region lab 1.5: pack the parts of a fused module
    @classmethod
    def pack(cls, loras: Sequence[LoRALayerWeights | None]) -> "PackedLoRALayerWeights":
        """Put the parts of a fused module side by side, each with its own A, B, rank and alpha.

        loras   one entry a part, in the order of the fused module's slices; None for a part without an
                adapter, but not for all. Each is optimized, so what is packed needs no scaling any more: 1.

        The result is named after the first part that is there.
        """
        present = [lora.optimize() for lora in loras if lora is not None]
        return cls(
            module_name=present[0].module_name,
            rank=max(lora.rank for lora in present),
            lora_alphas=[None if lora is None else lora.lora_alpha for lora in loras],
            lora_a=[None if lora is None else lora.lora_a for lora in loras],
            lora_b=[None if lora is None else lora.lora_b for lora in loras],
            scaling=[None if lora is None else 1 for lora in loras],
            bias=[None if lora is None else lora.bias for lora in loras],
        )

    # endregion

    # region lab 1.7: pack the experts of a layer
    @classmethod
    def pack_moe(
        cls,
        loras: Sequence[LoRALayerWeights | None],
        module_name: str,
        is_non_gated_moe: bool = False,
    ) -> "PackedLoRALayerWeights":
        """Stack what the E experts of a layer have, part by part: A (E, r, K) and B (E, N, r) of [w1, w2, w3].

        loras             w1, w2, w3 (gate, down, up) of expert 0, then of expert 1, and so on; None for what has no
                          adapter, but not for all
        module_name       of the result
        is_non_gated_moe  experts have no up: the third part, which nobody reads, is the first one's tensors, scaling 1

        A part keeps the scaling that its experts share, for `optimize` to fold in. Where they differ each expert is
        optimized first, and the part's scaling is 1. A part that no expert has is None in all lists. `rank` is the
        largest of all.

        Raises ValueError, naming the module, for a length that is no multiple of 3, and where nothing has an adapter.
        """
        if len(loras) % 3 or all(lora is None for lora in loras):
            raise ValueError(
                f"{module_name}: expected w1, w2 and w3 of each expert, at least one of them with an adapter, got "
                f"{len(loras)} parts, {sum(lora is not None for lora in loras)} of them with an adapter"
            )
        parts = [cls._stack_experts(loras[part::3]) for part in range(3)]
        if is_non_gated_moe:
            parts[2] = copy(parts[0])
            parts[2].scaling = 1
        return cls(
            module_name=module_name,
            rank=max(part.rank for part in parts if part is not None),
            lora_alphas=[None if part is None else part.lora_alpha for part in parts],
            lora_a=[None if part is None else part.lora_a for part in parts],
            lora_b=[None if part is None else part.lora_b for part in parts],
            scaling=[None if part is None else part.scaling for part in parts],
        )

    @staticmethod
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
        lora_a = first.lora_a.new_zeros(len(loras), rank, first.input_dim)  # (E, r, K)
        lora_b = first.lora_b.new_zeros(len(loras), first.output_dim, rank)  # (E, N, r)
        for expert, lora in present.items():
            lora_a[expert, : len(lora.lora_a)] = lora.lora_a
            lora_b[expert, :, : len(lora.lora_a)] = lora.lora_b
        return LoRALayerWeights(first.module_name, rank, first.lora_alpha, lora_a, lora_b, first.scaling)

    # endregion

    # region lab 1.4: fold the scaling into B, once
    def optimize(self) -> "PackedLoRALayerWeights":
        """As for one module, part by part; a part without an adapter stays None."""
        for part, scaling in enumerate(self.scaling):
            if scaling is not None and scaling != 1:
                self.lora_b[part] = self.lora_b[part] * scaling  # (N_i, r_i)
                if self.bias[part] is not None:
                    self.bias[part] = self.bias[part] * scaling  # (1, N_i)
                self.scaling[part] = 1
        return self

    # endregion

    @property
    def input_dim(self) -> int:
        raise NotImplementedError("a packed module has one input width a part")

    @property
    def output_dim(self) -> int:
        raise NotImplementedError("a packed module has one output width a part")

    @property
    def is_packed(self) -> bool:
        return True

    def replace_tensors(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in ("lora_a", "lora_b", "bias"):
            setattr(self, name, [None if t is None else replace(t) for t in getattr(self, name)])

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (*self.lora_a, *self.lora_b, *self.bias) if t is not None]
