"""What a norm has to do with a sum over processes. Beside vllm/distributed/parallel_state.py (v0.22.1), not in vLLM."""

import functools
from collections.abc import Callable
from typing import Protocol

import torch


class Norm(Protocol):
    """An `RMSNorm` that adds to a residual first: its weight (H,), and what may stand in for it, once."""

    weight: torch.Tensor
    eps: float
    rest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None


class Summing(functools.partial):
    """A `rest` that sums x over processes, too, so that `complete` gives x as it is."""
