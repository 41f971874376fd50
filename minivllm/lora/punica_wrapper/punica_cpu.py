"""The CPU backends: token by token, and by adapter. Stands for vllm/lora/punica_wrapper/punica_cpu.py (v0.22.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minivllm.lora.ops.torch_ops import (
    bgmv_expand_slice,
    bgmv_shrink,
    sgmv_expand,
    sgmv_expand_slice,
    sgmv_shrink,
)
from minivllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from minivllm.lora.punica_wrapper.utils import compute_runs

if TYPE_CHECKING:
    from minivllm.lora.layers.base import BaseLayerWithLoRA
    from minivllm.lora.layers.fused_moe import FusedMoEWithLoRA


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
    """Two products for every run of rows with the same adapter. vLLM: `PunicaWrapperCPU`.

    The runner orders a batch by adapter, so that a run is an adapter. The slots live in two tensors a layer, whose
    rows are in the same order, by rank and then by slice:

        A  (S, R * n, K)
        B  (S, R * n, N)   a row reaches only its own slice's columns and is zero elsewhere

    so that all slices of an adapter of rank r are the first r * n rows of both: one shrink, one expand, nothing to
    take apart between them, and rank 4 in a slot for 64 costs what rank 4 costs. The zeros are the price: B is n
    times as large as it must be. On a CPU, where a step of a few rows is bound by the number of calls, that pays.
    """

    def adopt(self, layer: BaseLayerWithLoRA) -> None:
        if not layer.is_linear:
            return
        slots, _, rank, width = layer.lora_a_stacked[0].shape
        like, n = layer.lora_a_stacked[0], layer.n_slices
        a = like.new_zeros(slots, rank, n, width)
        b = like.new_zeros(slots, rank, n, sum(layer.output_slices))
        columns = b.split(layer.output_slices, 3)  # n x (S, R, n, N_i)
        layer.re_home(
            tuple(a[:, None, :, i] for i in range(n)),  # n x (S, 1, R, K)
            tuple(columns[i][:, None, :, i].transpose(2, 3) for i in range(n)),  # n x (S, 1, N_i, R)
        )
        layer.storage = (a.flatten(1, 2), b.flatten(1, 2))

    def slot_changed(self, layer: BaseLayerWithLoRA, slot: int) -> None:
        layer.slot_memo.pop(slot, None)

    def apply_linear(self, layer: BaseLayerWithLoRA, x: torch.Tensor) -> torch.Tensor:
        y = layer.base_output(x)  # (T, N)
        if self.no_lora:
            return y
        if x.dtype != layer.storage[0].dtype:
            self.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices)
            return y
        for slot, rows in self.runs:
            a, b = layer.slot_memo.get(slot) or self._live_rows(layer, slot)
            if len(a):
                y[rows].addmm_(torch.mm(x[rows], a.t()), b)
        return y

    def _live_rows(self, layer: BaseLayerWithLoRA, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of a slot as far as its adapter fills it; kept with the layer until the slot is written again."""
        live = layer.n_slices * max(slice_ranks[slot] for slice_ranks in layer.live_ranks)
        layer.slot_memo[slot] = rows = tuple(matrix[slot, :live] for matrix in layer.storage)
        return rows

    def expert_rows(self, layer: FusedMoEWithLoRA, adapters: torch.Tensor) -> list[tuple[int, int, slice]]:
        """(slot, expert, rows) of every run of pairs"""
        runs = compute_runs(adapters.tolist())
        return [(*divmod(adapter, layer.num_experts), rows) for adapter, rows in runs]

    def add_lora_experts(
        self,
        layer: FusedMoEWithLoRA,
        slices: slice,
        y: torch.Tensor,
        x: torch.Tensor,
        rows: list[tuple[int, int, slice]],
    ) -> None:
        offset = 0
        for lora_a, lora_b, ranks in zip(
            layer.lora_a_stacked[slices], layer.lora_b_stacked[slices], layer.live_ranks[slices]
        ):
            columns = slice(offset, offset + lora_b.shape[2])
            dtype = torch.promote_types(x.dtype, lora_a.dtype)
            for slot, expert, run in rows:
                if live := ranks[slot]:
                    a, b = lora_a[slot, expert, :live], lora_b[slot, expert, :, :live]
                    h = x[run].to(dtype) @ a.t().to(dtype)  # (rows, r)
                    y[run, columns] += h @ b.t().to(dtype)
            offset = columns.stop

    def add_shrink(
        self,
        y: torch.Tensor | tuple[torch.Tensor, ...],
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
    ) -> None:
        for i, lora_a in enumerate(lora_a_stacked):
            sgmv_shrink(x, lora_a, y[i], *_segments(self.runs, len(x)), scale)

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
            sgmv_expand_slice(x[i], lora_b, y, *_segments(self.runs, len(y)), offset, size, add_inputs)
            offset += size

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
        """By runs of sampled rows: B is as tall as the vocabulary, so it is read once an adapter, not once a row."""
        buffer = self.rank_buffer(x, lora_a_stacked) if buffer is None else buffer  # (P, R)
        segments = _segments(compute_runs(self.sampler_indices.tolist()), len(x))
        sgmv_shrink(x, lora_a_stacked, buffer, *segments, scale)
        sgmv_expand(buffer, lora_b_stacked, y, *segments, add_inputs=True)


def _segments(
    runs: list[tuple[int, slice]], tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Runs as the ops take them: (B,) starts, (B,) lengths, (B,) slots, B, longest run, tokens."""
    lengths = [rows.stop - rows.start for _, rows in runs]
    starts = torch.tensor([rows.start for _, rows in runs], dtype=torch.long)
    slots = torch.tensor([slot for slot, _ in runs], dtype=torch.long)
    longest = max(lengths, default=0)
    return starts, torch.tensor(lengths, dtype=torch.long), slots, len(slots), longest, tokens
