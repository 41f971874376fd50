"""Tensors in the middle of memory full of NaN, which shows a kernel that reads or writes beyond its own."""

import torch

GUARD = 64  # elements before and behind, at least


class Guarded:
    """A copy of `values` with NaN before, behind, and between its rows.

    view: the values, row stride wider than the row (for more than two dimensions: all but the first contiguous)
    """

    def __init__(self, values: torch.Tensor, gap: int = 5, device: str = "cpu") -> None:
        rows, *rest = values.shape
        width = values[0].numel() if rows else 0
        self.guard = 1 + GUARD // (width + gap)  # rows
        size = rows + 2 * self.guard, width + gap
        self.memory = torch.full(size, float("nan"), dtype=values.dtype, device=device)
        inside = self.memory[self.guard : -self.guard, :width]
        self.view = inside.unflatten(1, rest) if len(rest) > 1 else inside
        self.view.copy_(values)

    def assert_intact(self) -> None:
        """Nothing was written but the view."""
        memory = self.memory.clone()
        rows, width = len(self.view), self.view[0].numel()
        memory[self.guard : self.guard + rows, :width] = float("nan")
        assert memory.isnan().all()
