"""What every backend of the LoRA arithmetic can do. Stands for vllm/lora/punica_wrapper/punica_base.py (v0.22.1)."""

from __future__ import annotations

from minivllm.labs import Todo
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from minivllm.lora.ops.torch_ops import bgmv_expand, bgmv_expand_slice, bgmv_shrink
from minivllm.lora.punica_wrapper.utils import compute_runs, convert_mapping

if TYPE_CHECKING:
    from minivllm.lora.layers.base import BaseLayerWithLoRA
    from minivllm.lora.layers.fused_moe import FusedMoEWithLoRA
    from minivllm.lora.layers.utils import LoRAMapping


class PunicaWrapperABC(ABC):
    """The arithmetic of a mixed batch. vLLM: `PunicaWrapperABC`.

    Letters: T tokens, K input width, S slots, R rank of the slots, n packed slices of widths N_i, N their sum.
    All `add_*` work in place; base rows stay as they are.
    """

    @abstractmethod
    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        """Take in which adapter each row of the coming step has and which slot each adapter sits in."""

    @abstractmethod
    def add_shrink(
        self,
        y: torch.Tensor | tuple[torch.Tensor, ...],
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
    ) -> None:
        """y[i] = scale * x · A_iᵀ for every slice.   y: (n, T, R) float   x: (T, K)   A_i: (S, 1, R, K)"""

    @abstractmethod
    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor | tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
    ) -> None:
        """y[:, slice i] += x[i] · B_iᵀ.   y: (T, >=N)   x: (n, T, R)   B_i: (S, 1, N_i, R)"""

    @abstractmethod
    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """y[:, slice i] += scale * x · A_iᵀ · B_iᵀ. It adds to y; the base product is already there."""

    @abstractmethod
    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True
    ) -> None:
        """y (+)= x · Bᵀ, where x is what the tokens' rows of A hold.   y: (T, H)   x: (T, R)   B: (S, 1, H, R)"""

    @abstractmethod
    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """As `add_lora_linear`, on the sampled rows.   y: (P, V)   x: (P, H)   A: (S, 1, R, H)   B: (S, 1, V, R)"""


class PunicaWrapperBase(PunicaWrapperABC):
    """Keeps the metadata of a step and the two-step product. vLLM: `PunicaWrapperBase`.

    token_lora_indices  (T,) int64 slot of each token, -1 = base
    sampler_indices     (P,) int64 slot of each sampled row, -1 = base
    runs                (slot, rows) of every run of tokens that share an adapter
    no_lora             whether all rows are base rows

    The sizes it is made with are for backends that allocate ahead.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: object
    ) -> None:
        self.device = device
        self.token_lora_indices = torch.empty(0, dtype=torch.long, device=device)
        self.sampler_indices = torch.empty(0, dtype=torch.long, device=device)
        self.runs: list[tuple[int, slice]] = []
        self.no_lora = True

    @property
    def tables(self) -> list[torch.Tensor]:
        """What it has allocated ahead, beside slots."""
        return []

    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        self.token_lora_indices, self.sampler_indices, *_ = convert_mapping(
            mapping, lora_index_to_id, max_loras, vocab_size, 0, self.device
        )
        self.runs = compute_runs(self.token_lora_indices.tolist())
        self.no_lora = not self.runs

    def adopt(self, layer: BaseLayerWithLoRA) -> None:
        """Called once a layer: a backend that wants A and B elsewhere calls `layer.re_home` here."""

    def slot_changed(self, layer: BaseLayerWithLoRA, slot: int) -> None:
        """Called when a slot has been written or cleared: what was worked out from it no longer holds."""

    def sync_slots(self) -> None:
        """Called before every forward pass: the moment to take in what `slot_changed` told of."""

    def slots_of_tokens(self, tokens: int) -> torch.Tensor:
        """(T,) int64 slot of each token, -1 = base, where the layers compute."""
        return self.token_lora_indices[:tokens]

    def slots_of_samples(self, rows: int) -> torch.Tensor:
        """(P,) int64 slot of each sampled row, -1 = base, where the layers compute."""
        return self.sampler_indices[:rows]

    def reaches(self, layer: BaseLayerWithLoRA) -> bool:
        """Whether an adapter of this step has weights for the layer. A layer that most leave alone asks first."""
        return any(ranks[slot] for slot, _ in self.runs for ranks in layer.live_ranks)

    def add_lora_bias(
        self, y: torch.Tensor, lora_bias_stacked: tuple[torch.Tensor, ...], output_slices: tuple[int, ...]
    ) -> None:
        """y[:, slice i] += each row's own bias.   y: (T, N)   lora_bias_stacked: n x (S, 1, N_i)"""
        slots = self.slots_of_tokens(len(y))[:, None]  # (T, 1)
        for columns, bias in zip(y.split(output_slices, dim=1), lora_bias_stacked):
            own = bias[slots[:, 0].clamp(min=0), 0]  # (T, N_i)
            columns += own.masked_fill(slots < 0, 0).to(y.dtype)

    def apply_logits(self, layer: BaseLayerWithLoRA, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add what an output embedding's adapters give, as far as ranks are live.   y: (P, V)   x: (P, H)"""
        rank = max(layer.live_ranks[0])
        self.add_lora_logits(y, x, layer.lora_a_stacked[:, :, :rank], layer.lora_b_stacked[..., :rank], 1.0)

    @staticmethod
    def rank_buffer(x: torch.Tensor, lora_a_stacked: torch.Tensor) -> torch.Tensor:
        """Zeros (rows of x, R), at least in float32: what is lost between A and B is lost in every column."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.zeros(len(x), lora_a_stacked.shape[-2], dtype=dtype, device=x.device)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """As `add_lora_linear`, on the sampled rows.   y: (P, V)   x: (P, H)   A: (S, 1, R, H)   B: (S, 1, V, R)"""
        buffer = self.rank_buffer(x, lora_a_stacked) if buffer is None else buffer  # (P, R)
        bgmv_shrink(x, lora_a_stacked, buffer, self.sampler_indices, scale)
        bgmv_expand(buffer, lora_b_stacked, y, self.sampler_indices, add_inputs=True)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True
    ) -> None:
        """y (+)= x · Bᵀ, where x is what the tokens' rows of A hold.   y: (T, H)   x: (T, R)   B: (S, 1, H, R)"""
        self.add_expand(y, x[None], (lora_b_stacked,), (y.shape[-1],), add_inputs=add_inputs)

    def expert_rows(self, layer: FusedMoEWithLoRA, adapters: torch.Tensor) -> object:
        """What `add_lora_experts` wants to know of a layer's pairs, worked out once for w13 and w2.

        adapters: (P,) int64 s * E + e of each pair, -1 = base. vLLM: `moe_lora_align_block_size`
        """
        return adapters

    def add_lora_experts(
        self, layer: FusedMoEWithLoRA, slices: slice, y: torch.Tensor, x: torch.Tensor, rows: object
    ) -> None:
        """y[:, slice i] += x · Aᵀ · Bᵀ with each pair's own adapter, over those slices of the layer, side by side.

        y: (P, N)   x: (P, K)   rows: what `expert_rows` gave. vLLM: `add_lora_fused_moe`
        """
        offset = 0
        for lora_a, lora_b in zip(layer.lora_a_stacked[slices], layer.lora_b_stacked[slices]):
            a, b = lora_a.flatten(0, 1), lora_b.flatten(0, 1)  # (S * E, R, K), (S * E, N_i, R)
            h = self.rank_buffer(x, a)  # (P, R)
            bgmv_shrink(x, a, h, rows)
            bgmv_expand_slice(h, b, y, rows, offset, b.shape[1])
            offset += b.shape[1]

    # region lab 3.6: the whole product of a wrapped linear
    def apply_linear(self, layer: BaseLayerWithLoRA, x: torch.Tensor) -> torch.Tensor:
        """Base output plus every row's own adapter.   x: (T, K) -> (T, N)

        The scaling is in the layer's B already. A batch without adapters pays for nothing beyond the base layer.
        """
        raise Todo("lab 3.6: the whole product of a wrapped linear")

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """A shrink of all slices into the buffer, then an expand of it, added to y.   y: (T, N)   x: (T, K)

        A_i: (S, 1, R, K)   B_i: (S, 1, N_i, R)   output_slices: the n widths N_i
        buffer  (n, T, R) float to work in, whatever it holds; None = a new one in x's dtype, but at least in float32:
                what is lost between A and B is lost in every column of y
        """
        raise Todo("lab 3.6: the whole product of a wrapped linear")

    # endregion
