"""The backend that computes run by run, a CPU's. Stands for vllm/lora/punica_wrapper/punica_cpu.py (v0.22.1)."""

from labs.kit.overlay import Todo
from typing import ClassVar

import torch

from minivllm.layers.linear import LinearBase
from minivllm.lora.loops_backend import LoopsBackend
from minivllm.lora.mapping import compute_runs
from minivllm.lora.ops.by_run import expand_runs, shrink_runs
from minivllm.lora.slots import Slots


class RunsBackend(LoopsBackend):
    """A product for every run of rows with the same adapter, up to its rank and no further.

    The runner orders a batch by adapter, so that a run is an adapter.
    """

    shrink_op: ClassVar = staticmethod(shrink_runs)
    expand_op: ClassVar = staticmethod(expand_runs)

    def as_rows(self, adapters: torch.Tensor) -> list[tuple[int, slice]]:
        return compute_runs(adapters.tolist())

    def place(self, slots: Slots, base: LinearBase | None) -> Slots:
        """A linear's B by columns: those of a short rank are then neighbours in memory."""
        return slots if base is None else slots.by_column()

    # region lab 3.6: the whole product of a wrapped linear
    def linear(self, x: torch.Tensor, base: LinearBase, slots: Slots) -> torch.Tensor:
        """Base output plus every row's own adapter, run by run.   x: (T, K) -> (T, N)

        By hand, W is the identity, and the adapter of row 1 has A = [1 1] and B = [5 0]ᵀ, with its scaling folded in:

            x = [1 2]    base row     y = [1 2]
                [3 4]    A x = 7      y = [3 + 35  4]

        A batch without adapters pays for the base product alone. Otherwise an adapter's A and B are multiplied by its
        own rows and by no other, up to its own rank, and a slice of which it has nothing costs nothing. This holds for
        an x of the slots' dtype. One of another dtype is left to `add`, which promotes. `add` is given the slot of each
        row of x (`token_rows`).

        To use: `no_lora`, `runs`, `token_rows(T)` and `add(y, x, slots, rows)` of a backend (backend.py). Slots have
        `live(slot)`, which gives columns, A and B of each slice, and `a` (slots.py).
        """
        raise Todo("lab 3.6: the whole product of a wrapped linear")

    # endregion
