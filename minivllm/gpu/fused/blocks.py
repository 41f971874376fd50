"""The blocks of a Llama with fused kernels. Beside the fusions of vllm/compilation/passes/fusion (v0.22.1).

A kernel that reads a linear's output anyway can also add what adapters add, and sum over ranks. So the linear hands on
its output with a value that says what is left to do (`Pending`): rows are read once instead of three times, and
launches are saved.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from minivllm.gpu.kernels.adapted_norm_op import adapted_norm
from minivllm.gpu.kernels.adapted_rotary_op import adapted_rotary
from minivllm.gpu.kernels.adapted_silu_op import adapted_silu
from minivllm.gpu.kernels.paged_tuning import norm_adds
from minivllm.gpu.kernels.rotary import rotary_and_cache
from minivllm.gpu.kernels.update import DeferredUpdate, Update
from minivllm.gpu.paged_attention import PagedAttentionMetadata, rotate_and_attend
from minivllm.layers.attention import Attention, AttentionMetadata
from minivllm.layers.norm import RMSNorm
from minivllm.layers.ranks import Ranks
from minivllm.lora.layers.base import BaseLinearLayerWithLoRA
from minivllm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel, Rotary

AnyAttentionMetadata = AttentionMetadata | PagedAttentionMetadata


@runtime_checkable
class SumsInNorms(Protocol):
    """Ranks whose kernels sum over ranks and norm at once.   None: not such rows, `all_reduce` must sum them."""

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """residual += the sum of all ranks' x, in place; the norm of that.   x, residual: (T, H) -> (T, H)"""

    def add_adapters_and_norm(
        self,
        update: Update,
        slots: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor | None:
        """As `add_and_norm`, what adapters add included. h of the update is this rank's term.   slots: (T,)"""


class Pending(NamedTuple):
    """A linear's output (T, N), and what is still to be done to it.

    update    what adapters add; None = y has it
    is_term   whether y, and h of the update, are terms of sums over the ranks that share the model
    """

    y: torch.Tensor
    update: DeferredUpdate | None = None
    is_term: bool = False


def linear_deferred(linear: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, DeferredUpdate | None]:
    """A linear's output, and what adapters still have to add to it; None = nothing.   x: (T, K) -> (T, N)

    A linear with a forward hook is called as it is, because a hook is to see the whole output.
    """
    if isinstance(linear, BaseLinearLayerWithLoRA) and not linear._forward_hooks:
        return linear.forward_deferred(x)
    return linear(x)[0], None


class AddAndNorm:
    """residual += a linear's output, with all that is pending, and the RMS norm of that; in one kernel where it can.

    tp     the ranks that share the model
    sums   the same, if their kernels sum and norm at once; else None
    """

    def __init__(self, tp: Ranks) -> None:
        self.tp = tp
        self.sums = tp if isinstance(tp, SumsInNorms) else None

    def __call__(self, pending: Pending, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """residual: (T, H), changed in place -> (T, H)"""
        y, deferred, is_term = pending
        is_term = is_term and self.tp.size > 1
        if deferred is not None:
            normed = self._with_adapters(deferred, is_term, y, residual, norm)
            if normed is not None:
                return normed
            deferred.add_to(y)
        if is_term:
            normed = self.sums and self.sums.add_and_norm(y, residual, norm.weight, norm.eps)
            if normed is not None:
                return normed
            y = self.tp.all_reduce(y)
        return norm(y, residual)[0]

    def _with_adapters(
        self, deferred: DeferredUpdate, is_term: bool, y: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor | None:
        """None where an expand before the norm is faster, or no kernel sums so over ranks."""
        update, _, slots = deferred
        if len(update.pieces.b) != 1 or not norm_adds(len(slots), update.pieces.rank):
            return None
        if is_term:
            return self.sums and self.sums.add_adapters_and_norm(
                update, slots, y, residual, norm.weight, norm.eps
            )
        return adapted_norm(update, slots, norm.weight, norm.eps, y, residual)


def activate(activation: nn.Module, gate_up: torch.Tensor, deferred: DeferredUpdate | None) -> torch.Tensor:
    """As `SiluAndMul`, what adapters still have to add to gate and up included.   gate_up: (T, 2I) -> (T, I)"""
    if deferred is not None and len(deferred.update.pieces.b) == 2:
        return adapted_silu(deferred.update, gate_up, deferred.tiles)
    if deferred is not None:
        deferred.add_to(gate_up)
    return activation(gate_up)


class FusedMLP(nn.Module):
    """A `LlamaMLP` whose activation adds what adapters add to gate and up."""

    def __init__(self, mlp: LlamaMLP) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = mlp.gate_up_proj, mlp.down_proj, mlp.act_fn

    def forward(self, x: torch.Tensor) -> Pending:
        """x: (T, H) -> (T, H), pending"""
        activated = activate(self.act_fn, *linear_deferred(self.gate_up_proj, x))  # (T, I)
        return Pending(*linear_deferred(self.down_proj, activated), is_term=True)


class FusedAttention(nn.Module):
    """A `LlamaAttention` that rotates, writes the cache and adds what adapters add to q, k and v in one kernel.

    Norms of q and k read these before: then it is added by itself.
    """

    def __init__(self, attention: LlamaAttention) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = attention.qkv_proj, attention.o_proj
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim
        self.attn, self.q_norm, self.k_norm = attention.attn, attention.q_norm, attention.k_norm

    def forward(self, x: torch.Tensor, rotary: Rotary, attn: AnyAttentionMetadata) -> Pending:
        """x: (T, H) -> (T, H), pending"""
        qkv, deferred = linear_deferred(self.qkv_proj, x)  # (T, (Hq + 2 Hkv) * D)
        heads = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)  # (T, Hq + 2 Hkv, D)
        if self.q_norm is not None:
            if deferred is not None:
                deferred.add_to(qkv)
                deferred = None
            q, k, _ = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            self.q_norm.norm_(q)
            self.k_norm.norm_(k)
        attended = attend(self.attn, heads, rotary, attn, deferred)  # (T, Hq * D)
        return Pending(*linear_deferred(self.o_proj, attended), is_term=True)


def attend(
    attention: Attention,
    heads: torch.Tensor,
    rotary: Rotary,
    attn: AnyAttentionMetadata,
    deferred: DeferredUpdate | None = None,
) -> torch.Tensor:
    """As `Attention`, what adapters still have to add to q, k and v included; for each kind of metadata.

    heads: (T, Hq + 2 Hkv, D), queries, keys, values, which change in place -> (T, Hq * D)
    """
    rotate = rotary_and_cache
    if deferred is not None:
        rotate = partial(adapted_rotary, deferred.update, tiles=deferred.tiles)
    if isinstance(attn, PagedAttentionMetadata):
        return rotate_and_attend(heads, rotary, attention.kv_cache, attention.scale, attn, rotate)
    if deferred is None:
        return attention(heads, rotary, attn)
    rotate(heads, *rotary, attn.slot_mapping, attention.kv_cache)
    kv_heads = attention.num_kv_heads
    return attention.attend(*heads.split([attention.num_heads, kv_heads, kv_heads], dim=1), attn)


class FusedDecoderLayer(nn.Module):
    """A `LlamaDecoderLayer` whose norms do what its linears have left: adapters' share, sums over ranks."""

    def __init__(self, layer: LlamaDecoderLayer, add_and_norm: AddAndNorm) -> None:
        super().__init__()
        self.add_and_norm = add_and_norm
        self.self_attn = FusedAttention(layer.self_attn)
        self.mlp = FusedMLP(layer.mlp) if isinstance(layer.mlp, LlamaMLP) else layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(
        self, pending: Pending, residual: torch.Tensor | None, rotary: Rotary, attn: AnyAttentionMetadata
    ) -> tuple[Pending, torch.Tensor]:
        """pending: (T, H), not yet added to residual: (T, H), which is None in the first block

        Returns the block's output, pending, and the residual, changed in place.
        """
        if residual is None:
            residual = pending.y
            hidden_states = self.input_layernorm(residual)  # (T, H)
        else:
            hidden_states = self.add_and_norm(pending, residual, self.input_layernorm)
        pending = self.self_attn(hidden_states, rotary, attn)
        hidden_states = self.add_and_norm(pending, residual, self.post_attention_layernorm)
        output = self.mlp(hidden_states)
        return output if isinstance(output, Pending) else Pending(output), residual


class FusedLlamaModel(nn.Module):
    """A `LlamaModel` of fused blocks."""

    def __init__(self, model: LlamaModel, tp: Ranks) -> None:
        super().__init__()
        self.add_and_norm = AddAndNorm(tp)
        self.embed_tokens, self.rotary_emb = model.embed_tokens, model.rotary_emb
        self.layers = nn.ModuleList(FusedDecoderLayer(layer, self.add_and_norm) for layer in model.layers)
        self.norm = model.norm

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AnyAttentionMetadata
    ) -> torch.Tensor:
        """input_ids, positions: (T,) int64 -> (T, H)"""
        pending, residual = Pending(self.embed_tokens(input_ids)), None  # (T, H)
        rotary = self.rotary_emb(positions)
        for layer in self.layers:
            pending, residual = layer(pending, residual, rotary, attn)
        return self.add_and_norm(pending, residual, self.norm)
