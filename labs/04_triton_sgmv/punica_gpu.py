"""The GPU backends: SGMV kernels, and A folded into the base weight.

Stands for vllm/lora/punica_wrapper/punica_gpu.py (v0.22.1).
"""

from __future__ import annotations

from minivllm.labs import Todo
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.lora.ops.triton_ops import (
    LoRAKernelMeta,
    TileList,
    expand,
    lora_expand,
    lora_shrink,
    shrink,
    tiles_of,
)
from minivllm.lora.ops.triton_ops.tuning import fold_pays
from minivllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from minivllm.lora.punica_wrapper.utils import slots_of

if TYPE_CHECKING:
    from minivllm.lora.layers.base import BaseLayerWithLoRA
    from minivllm.lora.layers.fused_moe import FusedMoEWithLoRA
    from minivllm.lora.layers.utils import LoRAMapping

# Rows of y and of the folded weight begin at multiples of so many elements: 16 bytes, as matrix products want them.
ALIGNMENT = 8
SECTOR_BYTES = 32


class PunicaWrapperGPU(PunicaWrapperBase):
    """A shrink and an expand for each linear, one launch each, whatever the mixture. vLLM: `PunicaWrapperGPU`.

    Adapters need not be neighbours in the batch: a tile list, made once a step, gathers their rows. The buffers
    that kernels read stay where they are, so a captured CUDA graph holds for every later step of its size.

    token_meta, prompt_meta   tile lists over the tokens, and over the sampled rows
    ranks                     (sum of n over layers, S) int32: live rank of each slice and slot
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, max_loras: int
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self.token_meta = LoRAKernelMeta.make(max_loras, max_num_batched_tokens, device)
        self.prompt_meta = LoRAKernelMeta.make(max_loras, max_batches, device)
        self.ranks = torch.zeros(0, max_loras, dtype=torch.int32, device=device)
        self._layers: dict[BaseLayerWithLoRA, int] = {}  # layer -> its first row of `ranks`
        self._ranks_are_stale = False
        self._token_slots = torch.full((max_num_batched_tokens,), -1, dtype=torch.long, device=device)
        self._sampler_slots = torch.full((max_batches,), -1, dtype=torch.long, device=device)
        self._copied = self.token_lora_indices  # what the two hold on the GPU
        self._slots_found_in, self._step_slots = self.token_lora_indices, set[int]()

    @property
    def tables(self) -> list[torch.Tensor]:
        tile_lists = [
            table for meta in (self.token_meta, self.prompt_meta) for table in (meta.rows, meta.tiles)
        ]
        return [*tile_lists, self.ranks, self._token_slots, self._sampler_slots]

    def adopt(self, layer: BaseLayerWithLoRA) -> None:
        first = len(self.ranks)
        self._layers[layer] = first
        self.ranks = self.ranks.new_zeros(first + layer.n_slices, self.ranks.shape[1])
        self._ranks_are_stale = True

    def slot_changed(self, layer: BaseLayerWithLoRA, slot: int) -> None:
        self._ranks_are_stale = True

    def sync_slots(self) -> None:
        if self._ranks_are_stale:
            ranks = [slice_ranks for layer in self._layers for slice_ranks in layer.live_ranks]
            self.ranks.copy_(torch.tensor(ranks, dtype=torch.int32), non_blocking=True)
            self._ranks_are_stale = False
        if self._copied is not self.token_lora_indices and not self.no_lora:
            self._token_slots[: len(self.token_lora_indices)].copy_(
                self.token_lora_indices, non_blocking=True
            )
            self._sampler_slots[: len(self.sampler_indices)].copy_(self.sampler_indices, non_blocking=True)
            self._copied = self.token_lora_indices

    # region lab 4.4: tile lists once a step, two launches a linear
    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        """Take in a step: both index tensors, kept on the CPU, `no_lora`, and a tile list of each for the kernels.

        Done once a step, for all layers. A step without adapters launches nothing, so it needs no tile lists. Live
        ranks come up to date here too (`sync_slots`). A mapping that `slots_of` refuses changes nothing.
        """
        raise Todo("lab 4.4: tile lists once a step, two launches a linear")

    def apply_linear(self, layer: BaseLayerWithLoRA, x: torch.Tensor) -> torch.Tensor:
        """Base output plus every row's own adapter, in two launches for all slices.   x: (T, K) -> (T, N)

        A batch without adapters pays for nothing beyond the base layer. A short adapter does not pay for R: the shrink
        is told the layer's live ranks, the expand where `_ranks_for_expand` has them. `_flat` makes the slot buffers
        what the kernels take.
        """
        raise Todo("lab 4.4: tile lists once a step, two launches a linear")

    # endregion

    def slots_of_tokens(self, tokens: int) -> torch.Tensor:
        return self._token_slots[:tokens]

    def slots_of_samples(self, rows: int) -> torch.Tensor:
        return self._sampler_slots[:rows]

    def reaches(self, layer: BaseLayerWithLoRA) -> bool:
        """A captured graph has to hold for every later step. What no adapter has weights for ends at once."""
        return layer.in_cuda_graphs or any(
            ranks[slot] for slot in self._slots_of_step() for ranks in layer.live_ranks
        )

    def _slots_of_step(self) -> set[int]:
        """Slots that the step uses; found once a step, and only if somebody asks."""
        if self._slots_found_in is not self.token_lora_indices:
            self._step_slots = set(self.token_lora_indices.tolist()) - {-1}
            self._slots_found_in = self.token_lora_indices
        return self._step_slots

    def expert_rows(self, layer: FusedMoEWithLoRA, adapters: torch.Tensor) -> TileList:
        """A tile list of the pairs, made where they are: the CPU never learns which experts were chosen."""
        return tiles_of(adapters, len(layer.live_ranks[0]) * layer.num_experts)

    def add_lora_experts(
        self, layer: FusedMoEWithLoRA, slices: slice, y: torch.Tensor, x: torch.Tensor, rows: TileList
    ) -> None:
        lora_a, lora_b = (
            [buffer.flatten(0, 1) for buffer in stacked[slices]]  # (S * E, R, K_i), (S * E, N_i, R)
            for stacked in (layer.lora_a_stacked, layer.lora_b_stacked)
        )
        ranks = self._ranks_of(layer)[slices].repeat_interleave(layer.num_experts, dim=1)  # (n, S * E)
        h = shrink(x, lora_a, rows, ranks)  # (splits, n, P, R)
        expand(h, lora_b, y, rows, ranks)

    def apply_logits(self, layer: BaseLayerWithLoRA, y: torch.Tensor, x: torch.Tensor) -> None:
        tiles, ranks = self.prompt_meta.meta_args(len(x)), self._ranks_of(layer)
        h = shrink(x, _flat((layer.lora_a_stacked,)), tiles, ranks)  # (splits, 1, P, R)
        expand(h, _flat((layer.lora_b_stacked,)), y, tiles, ranks)

    def _ranks_of(self, layer: BaseLayerWithLoRA) -> torch.Tensor:
        """(n, S) int32"""
        first = self._layers[layer]
        return self.ranks[first : first + layer.n_slices]

    def _ranks_for_expand(self, layer: BaseLayerWithLoRA) -> torch.Tensor | None:
        """None where looking a rank up costs more than it saves: memory comes in sectors, so a row of B is one read."""
        row = layer.lora_b_stacked[0][0, 0, 0]
        return None if row.nbytes <= SECTOR_BYTES else self._ranks_of(layer)

    def add_shrink(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
    ) -> None:
        lora_shrink(x, lora_a_stacked, y, *self.token_meta.meta_args(len(x)), scale)

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
    ) -> None:
        lora_expand(x, lora_b_stacked, y, *self.token_meta.meta_args(len(y)), offset_start, add_inputs)

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
        if buffer is not None:
            return super().add_lora_linear(
                y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer=buffer
            )
        tiles = self.token_meta.meta_args(len(x))
        h = shrink(x, _flat(lora_a_stacked), tiles, scaling=scale)  # (splits, n, T, R)
        return expand(h, _flat(lora_b_stacked), y, tiles)

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
        tiles = self.prompt_meta.meta_args(len(x))
        h = shrink(x, _flat((lora_a_stacked,)), tiles, scaling=scale)  # (splits, 1, P, R)
        expand(h, _flat((lora_b_stacked,)), y, tiles)


class PunicaWrapperFolded(PunicaWrapperGPU):
    """Every slot's A as further rows of the base weight, so that one product gives base and shrink together.

        W  (N + S * n * R, K)   the base weight, then slot by slot and slice by slice the A's

    The shrink then needs no launch of its own, and reads x no second time; each row has its h for every slot, and
    the expand picks the one it wants. The price is S * n * R more columns for every row, whoever uses them: where
    that costs more than a shrink (`fold_pays`), the SGMV kernels run on the very same buffers. A batch without
    adapters multiplies by the first N rows and pays nothing. Not in vLLM.
    """

    def adopt(self, layer: BaseLayerWithLoRA) -> None:
        super().adopt(layer)
        layer.storage = None
        if not layer.is_linear or not layer.is_plain:
            return
        base, n = layer.base_layer, layer.n_slices
        slots, _, rank, width = layer.lora_a_stacked[0].shape
        if not base.weight.numel():
            raise ValueError(
                "the folded backend needs the base weight itself, which a CPU in float32 has packed; use grouped"
            )
        if base.weight.dtype != layer.lora_a_stacked[0].dtype:
            raise ValueError(
                f"the folded backend keeps adapters in the base weight's dtype {base.weight.dtype}, but lora_dtype is "
                f"{layer.lora_a_stacked[0].dtype}; leave it on auto or take another punica backend"
            )
        folded = slots * n * rank
        rows = -(-(layer.output_size + folded) // ALIGNMENT) * ALIGNMENT
        wide = base.weight.new_zeros(rows, width)
        wide[: layer.output_size] = base.weight
        base.weight = nn.Parameter(wide[: layer.output_size], requires_grad=False)
        wide_bias = None
        if base.bias is not None:
            wide_bias = base.bias.new_zeros(rows)
            wide_bias[: layer.output_size] = base.bias
            base.bias = nn.Parameter(wide_bias[: layer.output_size], requires_grad=False)
        layer.storage = wide, wide_bias
        a = wide[layer.output_size : layer.output_size + folded].view(slots, n, rank, width)
        layer.re_home(tuple(a[:, i : i + 1] for i in range(n)), layer.lora_b_stacked)  # n x (S, 1, R, K)

    def apply_linear(self, layer: BaseLayerWithLoRA, x: torch.Tensor) -> torch.Tensor:
        slots, _, rank, width = layer.lora_a_stacked[0].shape
        n, columns = layer.n_slices, layer.output_size
        if self.no_lora or layer.storage is None or not fold_pays(len(x), slots, n * rank, width):
            return super().apply_linear(layer, x)
        wide = F.linear(x, *layer.storage)  # (T, N + S * n * R)
        y, h = wide[:, :columns], wide[:, columns:]
        h = h[:, : n * rank].unflatten(1, (n, rank)).transpose(0, 1)[None]  # (1, n, T, R): slot 0's
        tiles, ranks = self.token_meta.meta_args(len(x)), self._ranks_for_expand(layer)
        expand(h, _flat(layer.lora_b_stacked), y, tiles, ranks, h_slot_stride=n * rank)
        return y


def _flat(stacked: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Slot buffers without vLLM's dimension of one: n x (S, R, K) or (S, N_i, R)"""
    return [buffer[:, 0] for buffer in stacked]
