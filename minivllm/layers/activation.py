"""The gated activation of an MLP. Stands for vllm/model_executor/layers/activation.py (v0.22.1)."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """silu(gate) * up, where gate and up come from one product, side by side (vLLM: SiluAndMul)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: (T, 2I) -> (T, I)"""
        gate, up = gate_up.chunk(2, dim=-1)  # (T, I) each
        return F.silu(gate).mul_(up)
