"""Llama, Mistral, SmolLM2, Qwen2, Qwen3 and Phi-3, and with experts Mixtral and Qwen3MoE.

Stands for llama.py, mixtral.py and qwen3_moe.py of vllm/model_executor/models/ (v0.22.1).
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.activation import SiluAndMul
from minivllm.layers.attention import Attention, AttentionMetadata
from minivllm.layers.embedding import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import MergedColumnParallelLinear, Product, QKVParallelLinear, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.models.config import ModelArchitecture
from minivllm.models.interfaces import SupportsLoRA, WeightsMapper
from minivllm.models.moe import SparseMoeBlock

Rotary = tuple[torch.Tensor, torch.Tensor]


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (vLLM: LlamaMLP)."""

    def __init__(
        self,
        config: ModelArchitecture,
        dtype: torch.dtype,
        device: torch.device,
        tp: Ranks,
        product: Product,
    ) -> None:
        super().__init__()
        self.tp = tp
        hidden, width = config.hidden_size, config.intermediate_size
        options = config.mlp_bias, dtype, device
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [width] * 2, *options, "gate_up_proj", tp, product
        )
        self.down_proj = RowParallelLinear(width, hidden, *options, "down_proj", tp, product)
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (T, H) -> (T, H)"""
        gate_up, _ = self.gate_up_proj(x)  # (T, 2I)
        output, _ = self.down_proj(self.act_fn(gate_up))  # (T, H)
        return self.tp.all_reduce(output)


class LlamaAttention(nn.Module):
    """Grouped-query attention; Qwen3 also normalises each head of q and k (vLLM: LlamaAttention)."""

    def __init__(
        self,
        config: ModelArchitecture,
        dtype: torch.dtype,
        device: torch.device,
        tp: Ranks,
        product: Product,
    ) -> None:
        super().__init__()
        self.tp = tp
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden = config.hidden_size
        self.qkv_proj = QKVParallelLinear(
            hidden, size, heads, kv_heads, config.qkv_bias, dtype, device, "qkv_proj", tp, product
        )
        self.o_proj = RowParallelLinear(
            heads * size, hidden, config.o_bias, dtype, device, "o_proj", tp, product
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.head_dim = size
        self.attn = Attention(self.num_heads, size, size**-0.5, self.num_kv_heads)
        self.q_norm = RMSNorm(size, config.rms_norm_eps, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps, dtype, device) if config.qk_norm else None

    def forward(self, x: torch.Tensor, rotary: Rotary, attn: AttentionMetadata) -> torch.Tensor:
        """x: (T, H) -> (T, H)"""
        qkv, _ = self.qkv_proj(x)  # (T, (Hq + 2 Hkv) * D)
        heads = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)  # (T, Hq + 2 Hkv, D)
        if self.q_norm is not None:
            q, k, _ = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            self.q_norm.norm_(q)
            self.k_norm.norm_(k)
        output, _ = self.o_proj(self.attn(heads, rotary, attn))  # (T, H)
        return self.tp.all_reduce(output)


class LlamaDecoderLayer(nn.Module):
    """One block, its MLP dense or experts (vLLM: LlamaDecoderLayer).

    Its output is added to the residual stream by the next norm.
    """

    def __init__(
        self,
        config: ModelArchitecture,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        tp: Ranks,
        product: Product,
    ) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, dtype, device, tp, product)
        mlp_type = SparseMoeBlock if layer in config.sparse_layers else LlamaMLP
        self.mlp = mlp_type(config, dtype, device, tp, product)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: Rotary,
        attn: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states: (T, H) not yet added to residual: (T, H), which is None in the first block

        Returns the block's output, not yet added, and the residual, changed in place.
        """
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)  # (T, H)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, rotary, attn)  # (T, H)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    """Embeddings, blocks and the last norm (vLLM: LlamaModel)."""

    def __init__(
        self,
        config: ModelArchitecture,
        dtype: torch.dtype,
        device: torch.device,
        tp: Ranks,
        product: Product,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype, device, tp=tp
        )
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.max_position_embeddings, config.rope_parameters, dtype, device
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, layer, dtype, device, tp, product)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionMetadata
    ) -> torch.Tensor:
        """input_ids, positions: (T,) int64 -> (T, H)"""
        hidden_states, residual = self.embed_tokens(input_ids), None  # (T, H)
        rotary = self.rotary_emb(positions)
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, rotary, attn)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class LlamaForCausalLM(nn.Module, SupportsLoRA):
    """A causal language model of the Llama family (vLLM: LlamaForCausalLM).

    Module names are the checkpoint's, but for the fused linears of packed_modules_mapping. Every module is
    looked up at each call, so that LoRA layers can take the places of linears and embeddings.

    supports_cuda_graphs: whether a step may be captured, which nothing that reads from the GPU may be.
    product: how all its linears compute.
    """

    supports_cuda_graphs: ClassVar = True
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    embedding_modules: ClassVar = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}

    def __init__(
        self,
        config: ModelArchitecture,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        tp: Ranks = ONE_RANK,
        product: Product = F.linear,
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        dtype, device = dtype or config.dtype, torch.device(device)
        self.model = LlamaModel(config, dtype, device, tp, product)
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, False, dtype, device, tp=tp, product=product
        )
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size, tp)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionMetadata
    ) -> torch.Tensor:
        """Run T tokens of P requests, writing their keys and values to the cache.

        input_ids, positions: (T,) int64 -> hidden states (T, H)
        """
        return self.model(input_ids, positions, attn)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: (P, H) -> (P, V)"""
        return self.logits_processor(self.lm_head, hidden_states)


class MixtralForCausalLM(LlamaForCausalLM):
    """Llama with experts in every layer (vLLM: MixtralForCausalLM)."""

    expert_params_mapping: ClassVar = ("w1", "w2", "w3")
    # Checkpoints and old adapters keep the block's first name; transformers 5 calls it `mlp`, as we do.
    hf_to_vllm_mapper: ClassVar = WeightsMapper(orig_to_new_substr={".block_sparse_moe.": ".mlp."})
    supports_cuda_graphs: ClassVar = False


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3 with experts in some layers, or in all (vLLM: Qwen3MoeForCausalLM)."""

    expert_params_mapping: ClassVar = ("gate_proj", "down_proj", "up_proj")
    supports_cuda_graphs: ClassVar = False
