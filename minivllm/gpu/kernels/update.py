"""What adapters add to a linear's output, for a kernel that reads the output anyway.

Beside vllm/lora/ops/triton_ops/lora_expand_op.py (v0.22.1), whose launch it saves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minivllm.gpu.kernels.paged_expand_op import paged_expand
from minivllm.gpu.kernels.paged_pieces import PagedPieces
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList


class Update(NamedTuple):
    """h · Bᵀ of every row's own slot, not yet multiplied. It has n slices, of N_i columns each; no experts.

    h       (n, T, R) of the pages' dtype, as `paged_shrink` gives it
    pieces  where B lies
    """

    h: torch.Tensor
    pieces: PagedPieces


class DeferredUpdate(NamedTuple):
    """What adapters add to a linear's output y, which does not have it yet.

    update   as kernels take it that read y anyway (gpu/fused)
    tiles    of all T rows
    slots    (T,) int64 slot of each row, -1 = base
    """

    update: Update
    tiles: TileList
    slots: torch.Tensor

    def add_to(self, y: torch.Tensor) -> None:
        """y += it, by a kernel of its own: what there is to do where no other kernel takes it."""
        paged_expand(*self.update, y, self.tiles)
