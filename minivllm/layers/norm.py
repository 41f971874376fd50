"""Root-mean-square normalisation. Stands for vllm/model_executor/layers/layernorm.py (v0.22.1)."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (vLLM: RMSNorm)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., H) -> (..., H)"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
