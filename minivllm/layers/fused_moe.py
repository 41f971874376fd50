"""The experts of a sparse layer. Stands for vllm/model_executor/layers/fused_moe/layer.py (v0.22.1)."""

from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.layers.activation import SiluAndMul
from minivllm.layers.ranks import ONE_RANK, Ranks

# grouped_mm reads rows in pieces of so many bytes.
GROUPED_MM_ALIGNMENT = 16


@dataclass(frozen=True)
class ExpertPairs:
    """The (token, expert) pairs of a batch, sorted by expert and then by token: P = T * k of them.

    rows      (P,) int64, the token of each pair, so that x[rows] are the pairs' inputs
    experts   (P,) int64, the expert of each pair, rising
    weights   (P,) float32 or float64, what the expert's answer counts for
    counts    (E,) int64, the pairs of each expert; an expert that no token chose has 0
    places    (P,) int64, where pair t * k + j, token t's j-th choice, is among the sorted ones
    """

    rows: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    places: torch.Tensor


class FusedMoE(nn.Module):
    """E gated MLPs, of which each token runs the k that the router chose for it (vLLM: FusedMoE).

    The work is done by pairs (token, expert), those of an expert side by side, so that each expert is one
    product with its rows. The stages `route`, `w13`, `w2` and `combine` may be called one by one: what LoRA adds
    has to be added between them.

    w13_weight   (E, 2I, H), of each expert the rows of gate (w1) and then those of up (w3)
    w2_weight    (E, H, I), down
    renormalize  whether the weights of a token's k experts are made to sum to one

    Processes share out I, of every expert: each has a term of a token's answer. w13_weight has the rows `inner` of
    gate and of up, w2_weight these columns.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        renormalize: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tp: Ranks = ONE_RANK,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.tp = num_experts, top_k, tp
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.renormalize = renormalize
        self.inner = tp.part_of(intermediate_size, "the experts' intermediate size")
        share = self.inner.stop - self.inner.start
        shape = num_experts, 2 * share, hidden_size
        # Uninitialised: the loader fills every parameter or raises.
        w13_weight = torch.empty(shape, dtype=params_dtype, device=device)  # (E, 2I, H)
        w2_weight = w13_weight.new_empty(num_experts, hidden_size, share)  # (E, H, I)
        self.w13_weight = nn.Parameter(w13_weight, requires_grad=False)
        self.w2_weight = nn.Parameter(w2_weight, requires_grad=False)
        self.act_fn = SiluAndMul()

    tp_rank, tp_size = property(attrgetter("tp.rank")), property(attrgetter("tp.size"))

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """x: (T, H), router_logits: (T, E) -> (T, H)"""
        pairs = self.route(router_logits)
        gate_up = self.w13(x[pairs.rows], pairs)  # (P, 2I)
        return self.combine(self.w2(self.act_fn(gate_up), pairs), pairs)

    def select_experts(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """router_logits: (T, E) -> weights (T, k) float32, or float64 if the logits are, and ids (T, k) int64

        A token's experts come in the order of their weights. Half precision would make near experts equal.
        """
        dtype = torch.promote_types(router_logits.dtype, torch.float32)
        weights, ids = router_logits.softmax(dim=-1, dtype=dtype).topk(self.top_k, dim=-1)  # (T, k) each
        if self.renormalize:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights, ids

    def route(self, router_logits: torch.Tensor) -> ExpertPairs:
        """router_logits: (T, E) -> the batch's pairs"""
        weights, ids = self.select_experts(router_logits)
        experts, order = ids.flatten().sort(stable=True)  # (P,) each
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        # By searching, since bincount would wait for the GPU to know its size.
        numbers = torch.arange(self.num_experts + 1, device=order.device)
        counts = torch.searchsorted(experts, numbers).diff()  # (E,)
        return ExpertPairs(order // self.top_k, experts, weights.flatten()[order], counts, places)

    def w13(self, x_pairs: torch.Tensor, pairs: ExpertPairs) -> torch.Tensor:
        """Gate and up of each pair, side by side. x_pairs: (P, H) -> (P, 2I)"""
        return product_by_expert(x_pairs, self.w13_weight, pairs)

    def w2(self, h: torch.Tensor, pairs: ExpertPairs) -> torch.Tensor:
        """Down of each pair. h: (P, I) -> (P, H)"""
        return product_by_expert(h, self.w2_weight, pairs)

    def combine(self, y: torch.Tensor, pairs: ExpertPairs) -> torch.Tensor:
        """Each token's answers, weighted and summed in the order of its choices. y: (P, H) -> (T, H)

        That order is the token's own: what else is in the batch does not change how its sum is rounded.
        """
        weighted = y * pairs.weights[:, None]  # (P, H), float32 at least
        choices = weighted[pairs.places].view(-1, self.top_k, self.hidden_size)  # (T, k, H)
        return self.tp.all_reduce(choices.sum(dim=1).to(y.dtype))

    def extra_repr(self) -> str:
        return (
            f"experts={self.num_experts}, top_k={self.top_k}, hidden={self.hidden_size}, "
            f"intermediate={self.intermediate_size}"
        )


def product_by_expert(x: torch.Tensor, weight: torch.Tensor, pairs: ExpertPairs) -> torch.Tensor:
    """x W_e^T, where e is each row's expert. x: (P, K), weight: (E, N, K) -> (P, N)"""
    if _grouped_mm_takes(x, weight):
        ends = pairs.counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    output = x.new_empty(len(x), weight.shape[1])
    counts = pairs.counts.tolist()
    for expert, rows, products in zip(weight, x.split(counts), output.split(counts), strict=True):
        if len(rows):
            torch.mm(rows, expert.T, out=products)
    return output


def _grouped_mm_takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether PyTorch has one kernel for all experts, which needs no counts on the host."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and all(size * x.itemsize % GROUPED_MM_ALIGNMENT == 0 for size in weight.shape[1:])
    )
