"""The worst place a backend may put slots in: nothing of them is contiguous, and all layers share one tensor."""

import torch

from minivllm.lora.slots import Slots


class ScatteredSlots:
    """Slots innermost, every second element NaN. `place` is the backend's method of that name."""

    def __init__(self, dtype, cells=400_000):
        self.pool = torch.full((cells, 2), float("nan"), dtype=dtype)
        self.used = 0

    def place(self, slots, base):
        a, b = ([self._cells(buffer.shape) for buffer in side] for side in (slots.a, slots.b))
        return Slots(a, b).take_over(slots)

    def _cells(self, shape):
        cells = self.pool[self.used : self.used + shape.numel(), 0]
        assert len(cells) == shape.numel(), "the pool is too small"
        self.used += shape.numel()
        return cells.view(*reversed(shape)).permute(3, 2, 1, 0)
