"""The CPU backends: token by token, and by adapter. Stands for vllm/lora/punica_wrapper/punica_cpu.py (v0.22.1)."""

from __future__ import annotations

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
        a, b = layer.storage
        if x.dtype != a.dtype:
            return super().apply_linear(layer, x)  # its ops convert
        y = layer.base_output(x)  # (T, N)
        if self.no_lora:
            return y
        n, width = a.shape[2], a.shape[3]
        for slot, rows in self.runs:
            ranks = [layer.live_ranks[i][slot] for i in range(n)]
            if not (rank := max(ranks)):
                continue
            shrunk = torch.mm(x[rows], a[slot, :rank].view(rank * n, width).t()).view(-1, rank, n)
            y_rows, start = y[rows], 0
            for i, size in enumerate(layer.output_slices):
                if live := ranks[i]:
                    columns = slice(start, start + size)
                    y_rows[:, columns].addmm_(shrunk[:, :live, i], b[slot, :live, columns])
                start += size
        return y

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
