"""Which part of an adapter a process has. For `slice_lora_a` and `slice_lora_b` in vllm/lora/layers (v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch

from minivllm.layers.ranks import EVERYTHING, Share

ALL = slice(None)
Runs = Sequence[slice]


@dataclass
class Cut(Share):
    """Some columns of each A and some rows of each B; what is cut is copied, so that no file's memory is kept for it.

    columns   of A, one entry a slice     rows   runs of B's rows, one entry a slice
    ranks     rows of A, the same of every slice, where adapters are fully sharded; None = all
    cuts_beside  whether what is beside A and B, such as a bias (1, N_i), goes by the rows of B
    """

    columns: Sequence[slice]
    rows: Sequence[Runs]
    ranks: slice | None = None
    cuts_beside: bool = True

    def sizes(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [
            (len(range(width)[columns]), sum(len(range(height)[run]) for run in runs))
            for (width, height), columns, runs in zip(sizes, self.columns, self.rows, strict=True)
        ]

    # region lab 11.1: slice an adapter for a rank
    def of_a(self, i: int, lora_a: torch.Tensor) -> torch.Tensor:
        """Slice i's `columns`, and of these the rows `ranks`: a copy, unless it is all of A."""
        raise Todo("lab 11.1: slice an adapter for a rank")

    def of_b(self, i: int, lora_b: torch.Tensor) -> torch.Tensor:
        """Slice i's `rows`, run after run: a copy, unless it is all of B."""
        raise Todo("lab 11.1: slice an adapter for a rank")

    def of(self, parts: list[Any]) -> list[Any]:
        """New parts with A and B cut, and what is beside them, as `Share.of` says."""
        raise Todo("lab 11.1: slice an adapter for a rank")

    # endregion


# region lab 11.1: slice an adapter for a rank
def share_of_linear(linear: Any, slices: int) -> Share:
    """For adapters on so many slices of a base linear: one for each linear that it fuses, or one for all of it.

    To use: `tp`, `heights`, `rows` and `columns` of the linear (minivllm/layers/linear.py).
    """
    raise Todo("lab 11.1: slice an adapter for a rank")


# endregion


def share_of_experts(experts: Any, slices: int) -> Share:
    """For adapters on a layer of experts: w1, w2 and w3, or w13 (gate and then up) and w2."""
    if experts.tp.size == 1:
        return EVERYTHING
    inner, whole = experts.inner, experts.intermediate_size
    up = slice(whole + inner.start, whole + inner.stop)
    columns, rows = [ALL, inner, ALL], [[inner], [ALL], [inner]]
    return Cut(columns, rows) if slices == 3 else Cut(columns[:2], [[inner, up], [ALL]])
