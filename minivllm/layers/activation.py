"""The gated activation of an MLP. Stands for vllm/model_executor/layers/activation.py (v0.22.1)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """silu(gate) * up, where gate and up come from one product, side by side (vLLM: SiluAndMul).

    rest   set by a linear whose output lacks something: computes the same, that included, of the next gate_up
    """

    def __init__(self) -> None:
        super().__init__()
        self.rest: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: (T, 2I) -> (T, I)"""
        if self.rest is not None:
            rest, self.rest = self.rest, None
            return rest(gate_up)
        if gate_up.is_cuda:
            from minivllm.gpu.kernels.activation import silu_and_mul

            return silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)  # (T, I) each
        return F.silu(gate).mul_(up)
