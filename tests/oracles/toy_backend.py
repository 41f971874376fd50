"""The contract of the arithmetic, written from its docstrings alone: sums over rows, one at a time, in float64."""

import torch

from minivllm.lora.backend import ALL_SLICES, Backend
from minivllm.lora.slots import Slots


class ToyBackend(Backend):
    """Every row asks its own adapter. Nothing is kept from step to step."""

    def add(
        self, y: torch.Tensor, x: torch.Tensor, slots: Slots, rows: torch.Tensor, slices: slice = ALL_SLICES
    ) -> None:
        for row, number in enumerate(rows.tolist()):
            start = 0
            for a, b in list(zip(slots.a, slots.b))[slices]:
                if number >= 0:
                    a_of, b_of = (t.flatten(0, 1)[number].double() for t in (a, b))  # (R, K), (N_i, R)
                    y[row, start : start + len(b_of)] += (b_of @ (a_of @ x[row].double())).to(y.dtype)
                start += b.shape[-2]

    def expand(self, y: torch.Tensor, h: torch.Tensor, slots: Slots, rows: torch.Tensor) -> None:
        for row, number in enumerate(rows.tolist()):
            if number >= 0:
                b = slots.b[0].flatten(0, 1)[number].double()  # (N, R)
                y[row, : len(b)] += (b @ h[row].double()).to(y.dtype)
