"""Adapters in pages, computed in one order. Stands for VLLM_BATCH_INVARIANT in vllm/lora/ops/triton_ops (v0.22.1)."""

from __future__ import annotations

import torch

from minivllm.gpu.paged_backend import PagedBackend
from minivllm.gpu.paged_slots import PagedSlots
from minivllm.gpu.sgmv import LoRAKernelMeta, TileList, expand, shrink
from minivllm.layers.linear import LinearBase
from minivllm.lora.backend import ALL_SLICES
from minivllm.lora.slots import Slots

# Rows of a tile, and shares of K, for any number of tokens.
ROWS, SPLITS = 16, 4


class InvariantMeta(LoRAKernelMeta):
    """A tile list whose tiles are as high in every batch: another height may be summed in another order."""

    @staticmethod
    def most_rows(tokens: int) -> int:
        return ROWS


class InvariantBackend(PagedBackend):
    """A row's output has the same bits whatever else is in the batch: tiles and planes do not depend on the batch."""

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        max_loras: int,
        max_rank: int,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, max_loras, max_rank)
        self.token_meta = InvariantMeta.make(max_loras, max_num_batched_tokens, device)
        self.prompt_meta = InvariantMeta.make(max_loras, max_batches, device)

    def linear(self, x: torch.Tensor, base: LinearBase, slots: PagedSlots) -> torch.Tensor:
        y = base.forward(x)[0]  # (T, N)
        if not self.no_lora:
            self.add(y, x, slots, self.token_rows(len(x)))
        return y

    def linear_deferred(
        self, x: torch.Tensor, base: LinearBase, slots: PagedSlots
    ) -> tuple[torch.Tensor, None]:
        """Leaves nothing: kernels that read y choose their tiles by the number of rows."""
        return self.linear(x, base, slots), None

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        slots: Slots,
        rows: TileList,
        slices: slice = ALL_SLICES,
    ) -> None:
        if not isinstance(slots, PagedSlots):
            h = shrink(x, slots.flat_a[slices], rows, slots.ranks[slices], splits=SPLITS)
            expand(h, slots.flat_b[slices], y, rows, slots.ranks[slices])
            return
        self._add_paged(y, x, slots.pieces.of(slices), rows, tokens=1)
