"""Open exercise, phase 03: all adapters as one wide one; a mask keeps each token's own.

Live rows of all A stand together, and so do live columns of all B. Two products serve the batch, x is read once, y is
read and written once, and nobody is brought together. It multiplies S times as much as it must: bytes are bought
with products, which pays while adapters are few and narrow.
"""

import torch


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: tuple[int, ...],
    ranks: tuple[int, ...],
) -> None:
    """Shrink with every adapter, forget what others gave, expand with every adapter."""
    wide_a = torch.cat([a[slot, :rank] for slot, rank in enumerate(ranks)])  # (sum of ranks, K)
    wide_b = torch.cat([b[slot, :, :rank].T for slot, rank in enumerate(ranks)])  # (sum of ranks, N)
    owner = torch.tensor([slot for slot, rank in enumerate(ranks) for _ in range(rank)])
    h = x @ wide_a.T  # (T, sum of ranks)
    h.mul_(torch.tensor(slots)[:, None] == owner)
    y.addmm_(h, wide_b)
