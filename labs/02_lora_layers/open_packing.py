"""Open exercise, phase 02: an adapter into its slot with next to no new memory. `lab open 2` judges it.

A GPU that serves is full: what an adapter's arrival takes beside its slot is taken from the KV cache. Here a slot has
three slices, R = 32. Weights come in float32, slots are bfloat16, and hold what the last adapter left there.

Budget: at most 0.1 of the adapter's own bytes at any one time, counted where PyTorch's allocator hands memory out.
The slot must hold exactly what this answer writes: B times scaling, multiplied in float32 and rounded once.
"""

import torch


def write(
    a_slot: list[torch.Tensor],
    b_slot: list[torch.Tensor],
    a: list[torch.Tensor | None],
    b: list[torch.Tensor | None],
    scalings: list[float],
) -> None:
    """Write each slice's part; zero past its rank, and all of a slice that the adapter leaves alone.

    a_slot: (R, K) bfloat16 each   b_slot: (N, R) bfloat16 each
    a: (r, K) float32 each         b: (N, r) float32 each; None = left alone
    """
    for i in range(len(a)):
        whole_a = torch.zeros(a_slot[i].shape)
        whole_b = torch.zeros(b_slot[i].shape)
        if a[i] is not None:
            rank = len(a[i])
            whole_a[:rank] = a[i]
            whole_b[:, :rank] = b[i] * scalings[i]
        a_slot[i].copy_(whole_a)
        b_slot[i].copy_(whole_b)
