"""The backend that computes token by token. Beside vllm/lora/punica_wrapper/punica_cpu.py (v0.22.1)."""

from typing import Any, ClassVar

import torch

from minivllm.lora.backend import ALL_SLICES, Backend
from minivllm.lora.ops.by_token import bgmv_expand_slice, bgmv_shrink
from minivllm.lora.slots import Slots


class LoopsBackend(Backend):
    """One small product for every row: slow, and easy to believe."""

    shrink_op: ClassVar = staticmethod(bgmv_shrink)
    expand_op: ClassVar = staticmethod(bgmv_expand_slice)

    def add(
        self, y: torch.Tensor, x: torch.Tensor, slots: Slots, rows: Any, slices: slice = ALL_SLICES
    ) -> None:
        offset = 0
        for a, b, ranks in zip(slots.a[slices], slots.b[slices], slots.live_ranks[slices]):
            if rank := max(ranks):
                # At least in float32: what is lost between A and B is lost in every column.
                h = x.new_zeros(len(x), rank, dtype=torch.promote_types(x.dtype, torch.float32))
                self.shrink_op(x, a[:, :, :rank].flatten(0, 1), h, rows)
                self.expand_op(h, b[..., :rank].flatten(0, 1), y, rows, offset, b.shape[2])
            offset += b.shape[2]

    def expand(self, y: torch.Tensor, h: torch.Tensor, slots: Slots, rows: Any) -> None:
        self.expand_op(h, slots.b[0].flatten(0, 1), y, rows, 0, y.shape[1])
