"""The worst place a backend may put slots in: nothing of them is contiguous, and all layers share one tensor."""

import torch


class ScatteredSlots:
    """Slots innermost, every second element NaN. `adopt` is the backend's method of that name."""

    def __init__(self, dtype, cells=400_000):
        self.pool = torch.full((cells, 2), float("nan"), dtype=dtype)
        self.used = 0

    def adopt(self, layer):
        homes = [
            tuple(self._place(buffer.shape) for buffer in buffers)
            for buffers in (layer.a_slots, layer.b_slots)
        ]
        layer.re_home(*homes)

    def _place(self, shape):
        cells = self.pool[self.used : self.used + shape.numel(), 0]
        assert len(cells) == shape.numel(), "the pool is too small"
        self.used += shape.numel()
        return cells.view(*reversed(shape)).permute(3, 2, 1, 0)
