"""The CPU backends: token by token, and by adapter. Stands for vllm/lora/punica_wrapper/punica_cpu.py (v0.22.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minivllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink, sgmv_expand_slice, sgmv_shrink
from minivllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

if TYPE_CHECKING:
    from minivllm.lora.layers.base import BaseLayerWithLoRA


class PunicaWrapperLoops(PunicaWrapperBase):
    """One small product for every token: slow, and easy to believe."""

    def add_shrink(
        self,
        y: torch.Tensor | tuple[torch.Tensor, ...],
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
    ) -> None:
        for i, lora_a in enumerate(lora_a_stacked):
            bgmv_shrink(x, lora_a, y[i], self.token_lora_indices, scale)

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor | tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
    ) -> None:
        offset = offset_start
        for i, (lora_b, size) in enumerate(zip(lora_b_stacked, output_slices)):
            bgmv_expand_slice(x[i], lora_b, y, self.token_lora_indices, offset, size, add_inputs)
            offset += size


@dataclass(frozen=True)
class _SlotMatrices:
    """One slot of one layer, as far as its adapter fills it: r is the largest of its slices' ranks.

    a   (K, r * n)   all slices' A, a rank's slices side by side
    b   n x (r, N_i) None for a slice without an adapter
    """

    rank: int
    a: torch.Tensor
    b: list[torch.Tensor | None]

    def by_slice(self, shrunk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(t, r * n) -> n x (t, r)"""
        n = len(self.b)
        if n == 1:
            return (shrunk,)
        return shrunk.view(-1, self.rank, n).permute(2, 0, 1).contiguous().unbind()


class PunicaWrapperCPU(PunicaWrapperBase):
    """One product for every run of rows with the same adapter. vLLM: `PunicaWrapperCPU`.

    The runner orders a batch by adapter, so that a run is an adapter. The slots live in two tensors a layer:

        A  (S, R, n, K)   rank first: the first r ranks of all slices are one matrix, read in one product
        B  (S, R, N)      transposed: a row of ranks times it is a plain product, written into y's columns

    so that an adapter of rank 4 in a slot for 64 costs what rank 4 costs.
    """

    def adopt(self, layer: BaseLayerWithLoRA) -> None:
        slots, _, rank, width = layer.lora_a_stacked[0].shape
        like = layer.lora_a_stacked[0]
        a = like.new_zeros(slots, rank, layer.n_slices, width)
        b = like.new_zeros(slots, rank, sum(layer.output_slices))
        layer.re_home(
            tuple(part.unsqueeze(1) for part in a.unbind(2)),  # n x (S, 1, R, K)
            tuple(part.transpose(1, 2).unsqueeze(1) for part in b.split(layer.output_slices, 2)),
        )  # n x (S, 1, N_i, R)
        layer.storage = (a, b)

    def apply_linear(self, layer: BaseLayerWithLoRA, x: torch.Tensor) -> torch.Tensor:
        y = layer.base_output(x)  # (T, N)
        if self.no_lora:
            return y
        if x.dtype != layer.storage[0].dtype:  # the ops convert
            self.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices)
            return y
        for slot, rows in self.runs:
            matrices = layer.slot_memo.get(slot) or self._slot_matrices(layer, slot)
            if not matrices.rank:
                continue
            shrunk = torch.mm(x[rows], matrices.a)  # (t, r * n)
            slices = y[rows].split(layer.output_slices, 1)
            for out, part, b in zip(slices, matrices.by_slice(shrunk), matrices.b):
                if b is not None:
                    out.addmm_(part, b)  # (t, N_i)
        return y

    def _slot_matrices(self, layer: BaseLayerWithLoRA, slot: int) -> _SlotMatrices:
        """The live part of a slot as views; kept with the layer until the slot is written again."""
        a, b = layer.storage
        ranks = [slice_ranks[slot] for slice_ranks in layer.live_ranks]
        rank = max(ranks)
        parts = b[slot, :rank].split(layer.output_slices, 1)  # n x (r, N_i)
        layer.slot_memo[slot] = matrices = _SlotMatrices(
            rank,
            a[slot, :rank].flatten(0, 1).t(),  # (K, r * n)
            [part if live else None for part, live in zip(parts, ranks)],
        )
        return matrices

    def add_shrink(
        self,
        y: torch.Tensor | tuple[torch.Tensor, ...],
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
    ) -> None:
        for i, lora_a in enumerate(lora_a_stacked):
            sgmv_shrink(x, lora_a, y[i], *self._segments(len(x)), scale)

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor | tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
    ) -> None:
        offset = offset_start
        for i, (lora_b, size) in enumerate(zip(lora_b_stacked, output_slices)):
            sgmv_expand_slice(x[i], lora_b, y, *self._segments(len(y)), offset, size, add_inputs)
            offset += size

    def _segments(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        """The runs as the ops take them: (B,) starts, (B,) lengths, (B,) slots, B, longest run, tokens."""
        lengths = [rows.stop - rows.start for _, rows in self.runs]
        starts = torch.tensor([rows.start for _, rows in self.runs], dtype=torch.long)
        slots = torch.tensor([slot for slot, _ in self.runs], dtype=torch.long)
        longest = max(lengths, default=0)
        return starts, torch.tensor(lengths, dtype=torch.long), slots, len(slots), longest, tokens
