"""Open exercise, phase 02: one scratch row for all of B.

A row of B at a time is scaled into the same few bytes. It is slow in Python; a kernel does the same in registers.
"""

import torch


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
            scratch = torch.empty(rank)
            for row in range(len(b[i])):
                torch.mul(b[i][row], scalings[i], out=scratch)
                b_slot[i][row, :rank].copy_(scratch)
