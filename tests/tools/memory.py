"""Memory full of NaN around tensors and slots, which shows code that reads or writes beyond its own; random batches.

Integers have no NaN: around them lie numbers that lead far away.
"""

import torch

from minivllm.lora.slots import Slots
from tests.oracles.rows import assert_rows_equal, labels_of
from tests.tools.device import DEVICE

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


DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Of the update alone. Products of half-precision numbers are summed in float32, h and y are rounded once each.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

OUTSIDE = "something was read outside a buffer, past a live rank, or where nobody has written"


def guard(values, row_gap=0):
    """The values on the device, in memory where everything around them is NaN.

    row_gap: NaN elements between rows, so that rows are further apart than they are long
    """
    return Guarded(values.flatten(0, -2), row_gap, DEVICE)


def guarded(values, row_gap=0):
    """The same, of the values' shape, for tensors that are only read."""
    return guard(values, row_gap).view.unflatten(0, values.shape[:-1])


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_slots(tokens, slots, base_share=0.3, seed=0):
    """(T,) slot of each row in no order, some of them -1."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, slots, (tokens,), generator=generator)
    return torch.where(torch.rand(tokens, generator=generator) < base_share, -1, picks)


def live_part(weights, ranks, dim):
    """A copy in which everything past each slot's rank is NaN: nobody may read it. `dim`: that of the rank."""
    weights = weights.clone()
    for slot, rank in enumerate(ranks):
        weights[slot].narrow(dim, rank, weights[slot].shape[dim] - rank).fill_(float("nan"))
    return weights


def exact_shrink(x, lora_a, token_slots, ranks, scaling=1.0):
    """(n, T, R) float64, zero for base rows and past each rank.   lora_a: n x (S, R, K)   ranks: n x S"""
    h = torch.zeros(len(lora_a), len(x), lora_a[0].shape[1], dtype=torch.float64)
    for i, a in enumerate(lora_a):
        for row, slot in enumerate(token_slots.tolist()):
            if slot >= 0 and (rank := ranks[i][slot]):
                h[i, row, :rank] = scaling * (a[slot, :rank].double() @ x[row].double())
    return h


def exact_expand(h, lora_b, y, token_slots, ranks):
    """(T, N) float64: y plus every row's own.   h: (n, T, R)   lora_b: n x (S, N_i, R)"""
    result, offset = y.double(), 0
    for i, b in enumerate(lora_b):
        columns = slice(offset, offset := offset + b.shape[1])
        for row, slot in enumerate(token_slots.tolist()):
            if slot >= 0 and (rank := ranks[i][slot]):
                result[row, columns] += b[slot, :, :rank].double() @ h[i, row, :rank].double()
    return result


def assert_rows_close(found, expected, token_slots, tolerance, what="y"):
    """found, expected: (T, ...)    tolerance: as a share of the largest value expected"""
    __tracebackhide__ = True
    assert_rows_equal(
        found, expected, labels=labels_of(token_slots), tolerance=tolerance, what=what, nan=OUTSIDE
    )


def by_row(h):
    """(n, T, R) -> (T, n, R): what each row has, for `assert_rows_close`."""
    return h.transpose(0, 1)
