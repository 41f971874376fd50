"""Root-mean-square normalisation. Stands for vllm/model_executor/layers/layernorm.py (v0.22.1)."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (vLLM: RMSNorm)."""

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
        # A double of no dimensions adopts the dtype of what it is combined with.
        root_eps = torch.tensor(eps**0.5, dtype=torch.float64, device=device)
        self.register_buffer("root_eps", root_eps, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., H) -> (..., H)"""
        if x.is_cuda or x.dtype.itemsize < 4:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # On a CPU F.rms_norm is eight operators, which take longer to start than to run; these are five.
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)  # (..., 1)
        return torch.mul(x, self.weight).div_(torch.hypot(rms, self.root_eps))
