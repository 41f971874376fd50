"""Layers that are one kernel. Stands for the CUDA side of vllm/model_executor/layers (v0.22.1)."""

import torch
from torch import nn

from minivllm.gpu.kernels.activation import silu_and_mul
from minivllm.gpu.kernels.norm import fused_add_rms_norm, rms_norm
from minivllm.layers.norm import RMSNorm


class FusedRMSNorm(nn.Module):
    """An `RMSNorm` as one kernel, the sum with the residual included (vLLM: RMSNorm.forward_cuda)."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x: (T, H) or (T, heads, H) -> the same shape

        With a residual (T, H), x is added to it in place first: normed sum, residual.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return fused_add_rms_norm(x, residual, self.weight, self.eps), residual

    def norm_(self, x: torch.Tensor) -> None:
        """Norm x in place.   x: as `forward` takes it, of any strides but the last"""
        rms_norm(x, self.weight, self.eps, out=x)


class FusedSiluAndMul(nn.Module):
    """`SiluAndMul` as one kernel (vLLM: SiluAndMul.forward_cuda)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: (T, 2I) -> (T, I)"""
        return silu_and_mul(gate_up)
