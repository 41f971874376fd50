"""Rotary positions by their definition, in float64."""

import torch


def rotated(heads: torch.Tensor, angles: torch.Tensor, count: int) -> torch.Tensor:
    """(T, H, D) float64: the first `count` heads turned by angles (T, 1, D / 2), the others as they are."""
    first, second = heads.double()[:, :count].chunk(2, dim=2)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    return torch.cat((turned, heads.double()[:, count:]), dim=1)
