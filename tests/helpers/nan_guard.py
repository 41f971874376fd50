"""Tensors in the middle of memory full of NaN, which shows code that reads or writes beyond its own.

Integers have none: around them lie numbers that lead far away.
"""

import torch

FAR = 10**9
GUARD = 256  # elements before and behind, at least: as many as a kernel's block has columns


class Guarded:
    """A copy of `values` with NaN before, behind, and between its rows.

    view    the values, row stride wider than the row (for more than two dimensions: all but the first contiguous)
    before  what the view held at first
    """

    def __init__(self, values: torch.Tensor, gap: int = 5, device: str = "cpu") -> None:
        rows, *self.rest = values.shape
        self.width = values.shape[1:].numel()
        self.guard = 1 + GUARD // (self.width + gap)  # rows
        size = rows + 2 * self.guard, self.width + gap
        poison = float("nan") if values.is_floating_point() else FAR
        self.memory = torch.full(size, poison, dtype=values.dtype, device=device)
        self.view = self._inside(self.memory)
        self.view.copy_(values)
        self._memory_before = self.memory.clone()
        self.before = self._inside(self._memory_before)

    def _inside(self, memory: torch.Tensor) -> torch.Tensor:
        inside = memory[self.guard : -self.guard, : self.width]
        return inside.unflatten(1, self.rest) if len(self.rest) > 1 else inside

    def assert_intact(self) -> None:
        """Nothing was written but the view."""
        self.assert_written_only_where(torch.ones((), dtype=torch.bool))

    def assert_written_only_where(self, allowed: torch.Tensor) -> None:
        """All memory is bit for bit what it was, but for the view's elements where `allowed` is True.

        allowed: bool, of the view's shape or one that expands to it
        """
        expected = self._memory_before.clone()
        inside = self._inside(expected)
        inside.copy_(torch.where(allowed.to(inside.device), self.view, inside))
        wrong = (self.memory != expected) & ~(self.memory.isnan() & expected.isnan())
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            row -= self.guard
            is_inside = 0 <= row < len(self.view) and column < self.width
            where = "that must stay as they are" if is_inside else "in the memory around the tensor"
            raise AssertionError(
                f"{wrong.sum()} elements were written {where}, the first in row {row}, column {column} "
                f"of a tensor of shape {tuple(self.view.shape)}"
            )
