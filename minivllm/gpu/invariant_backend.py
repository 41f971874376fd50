"""Adapters in pages, computed in one order. Stands for VLLM_BATCH_INVARIANT in vllm/lora/ops/triton_ops (v0.22.1)."""

from __future__ import annotations

import torch

from minivllm.gpu.pages.backend import PagedBackend, Tiling
from minivllm.gpu.sgmv import LoRAKernelMeta

# Rows of a tile, and shares of K, for any number of tokens.
ROWS, SPLITS = 16, 4


class InvariantMeta(LoRAKernelMeta):
    """A tile list whose tiles are as high in every batch: another height may be summed in another order."""

    @staticmethod
    def most_rows(tokens: int) -> int:
        return ROWS


class InvariantTiling(Tiling):
    """The same tiles in every batch, and nothing left to kernels that choose theirs by the number of rows."""

    meta_class = InvariantMeta
    defers = False
    splits = SPLITS

    def tokens(self, rows: int) -> int:
        return 1


def invariant_backend(
    max_num_batched_tokens: int,
    max_batches: int,
    device: torch.device | str,
    max_loras: int,
    max_rank: int,
) -> PagedBackend:
    """A row's output has the same bits whatever else is in the batch: tiles and planes do not depend on the batch."""
    return PagedBackend(max_num_batched_tokens, max_batches, device, max_loras, max_rank, InvariantTiling())
