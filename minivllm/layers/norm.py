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
        self.packed: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x: (..., H) -> the same shape

        With a residual, of the same shape, x is added to it in place first: normed sum, residual.
        """
        if residual is not None:
            residual += x
            x = residual
        if self.packed is None:
            normed = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        else:
            weight, root_eps = self.packed
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1)
            normed = torch.mul(x, weight).div_(torch.hypot(length, root_eps))
        return normed if residual is None else (normed, residual)

    def norm_(self, x: torch.Tensor) -> None:
        """Norm x in place. x: (..., H), of any strides"""
        x.copy_(self(x))

    def pack(self) -> None:
        """Prepare for float32 on a CPU, where F.rms_norm is eight operators that take longer to start than to run.

        With sqrt(H) folded into the weight and eps, four are enough. Call it when weights are loaded.
        """
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            size = len(self.weight)
            self.packed = self.weight * size**0.5, torch.tensor((size * self.eps) ** 0.5)
