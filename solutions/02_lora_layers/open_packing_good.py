"""Open exercise, phase 02: A is copied straight into the slot; of B a few rows at a time are scaled.

`copy_` converts as it goes. The product has to exist in float32 before it is rounded, but not all of it at once.
"""

import torch

ROWS = 64


def write(
    a_slot: list[torch.Tensor],
    b_slot: list[torch.Tensor],
    a: list[torch.Tensor | None],
    b: list[torch.Tensor | None],
    scalings: list[float],
) -> None:
    """Write each slice's part; zero past its rank."""
    for i in range(len(a)):
        rank = 0 if a[i] is None else len(a[i])
        a_slot[i][rank:].zero_()
        b_slot[i][:, rank:].zero_()
        if rank:
            a_slot[i][:rank].copy_(a[i])
            for start in range(0, len(b[i]), ROWS):
                rows = slice(start, start + ROWS)
                b_slot[i][rows, :rank].copy_(b[i][rows] * scalings[i])
