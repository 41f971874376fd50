"""Tensors in the middle of memory full of NaN, which shows a kernel that reads or writes beyond its own."""

import torch


class Guarded:
    """A copy of `values` with NaN before, behind, and between its rows.

    view: the values, row stride wider than the row (for more than two dimensions: all but the first contiguous)
    """

    def __init__(self, values: torch.Tensor, gap: int = 5, device: str = "cpu") -> None:
        rows, *rest = values.shape
        width = values[0].numel() if rows else 0
        self.memory = torch.full((rows + 2, width + gap), float("nan"), dtype=values.dtype, device=device)
        self.view = (
            self.memory[1:-1, :width].unflatten(1, rest) if len(rest) > 1 else self.memory[1:-1, :width]
        )
        self.view.copy_(values)

    def assert_intact(self) -> None:
        """Nothing was written but the view."""
        memory = self.memory.clone()
        rows, width = len(self.view), self.view[0].numel()
        memory[1 : 1 + rows, :width] = float("nan")
        assert memory.isnan().all()
