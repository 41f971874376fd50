"""A layer's experts and their router. Stands for vllm/model_executor/models/mixtral.py (v0.22.1)."""

import torch
from torch import nn

from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.linear import Product, ReplicatedLinear
from minivllm.layers.ranks import Ranks
from minivllm.models.config import ModelArchitecture


class SparseMoeBlock(nn.Module):
    """What a sparse layer has for an MLP: a router and experts (vLLM: MixtralMoE, Qwen3MoeSparseMoeBlock)."""

    def __init__(
        self,
        config: ModelArchitecture,
        dtype: torch.dtype,
        device: torch.device,
        tp: Ranks,
        product: Product,
    ) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(
            config.hidden_size, config.num_experts, False, dtype, device, product=product
        )
        self.experts = FusedMoE(
            config.num_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.moe_intermediate_size,
            config.norm_topk_prob,
            dtype,
            device,
            tp,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (T, H) -> (T, H)"""
        router_logits, _ = self.gate(x)  # (T, E)
        return self.experts(x, router_logits)
