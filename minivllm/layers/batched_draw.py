"""All random draws of a step at once, for a GPU. Stands for vllm/v1/sample/ops/topk_topp_sampler.py (v0.22.1)."""

from collections.abc import Sequence

import torch

from minivllm.layers.to_device import to_device
from minivllm.sampling_params import SamplingParams


def draw_tokens(
    logits: torch.Tensor, rows: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """What `draw_token` draws for every row, with a handful of kernels for all of them; the host waits for none.

    logits: (P, V); rows: P that are not greedy; generators: P, on the CPU, one number is drawn of each
    Returns (P,) int64
    """
    columns = [
        (p.temperature, p.min_p, p.top_k, p.top_p, torch.rand((), dtype=torch.float64, generator=g).item())
        for p, g in zip(rows, generators)
    ]
    options = to_device(columns, logits.device, torch.float64)  # (P, 5)
    temperature, min_p, top_k, top_p, uniform = options.split(1, dim=1)  # (P, 1) each
    weights = logits.double() / temperature  # (P, V)
    weights = weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()  # the likeliest token weighs 1
    if any(p.min_p > 0 for p in rows):
        weights.masked_fill_(weights < min_p, 0)
    if any(0 < p.top_k < logits.shape[1] for p in rows):
        _keep_top_k(weights, top_k.long(), max(p.top_k for p in rows))
    if any(p.top_p < 1 for p in rows):
        _keep_nuclei(weights, top_p)
    cumulative = weights.cumsum(dim=-1)  # (P, V)
    total = cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, uniform * total, right=True)  # (P, 1)
    # Rows whose weights are NaN take what argmax finds, as in `draw_token`.
    return torch.where(total >= 1, drawn, logits.argmax(dim=-1, keepdim=True)).squeeze(1)


def _keep_top_k(weights: torch.Tensor, top_k: torch.Tensor, largest: int) -> None:
    """Zero what is lighter than a row's k-th heaviest token; 0 and k >= V keep all. (P, V), (P, 1) int64"""
    size = weights.shape[1]
    heaviest = weights.topk(min(largest, size), dim=-1).values  # (P, K)
    lightest_kept = heaviest.gather(1, (top_k.clamp(max=heaviest.shape[1]) - 1).clamp(min=0))  # (P, 1)
    is_on = (top_k > 0) & (top_k < size)
    weights.masked_fill_(is_on & (weights < lightest_kept), 0)


def _keep_nuclei(weights: torch.Tensor, top_p: torch.Tensor) -> None:
    """Zero all but each row's smallest set of heaviest tokens that holds `top_p` of its weight; 1 keeps all.

    Of tied tokens the lower ids stay. (P, V), (P, 1)
    """
    wanted = torch.where(top_p < 1, top_p, -1) * weights.sum(dim=-1, keepdim=True)  # (P, 1)
    # All of them: to look whether fewer are enough, the host would have to wait.
    heaviest = weights.sort(dim=-1, descending=True).values  # (P, V)
    weight_before = heaviest.cumsum(dim=-1) - heaviest
    size = (weight_before < wanted).sum(dim=-1, keepdim=True).clamp(min=1)  # (P, 1) tokens of the nucleus
    lightest = heaviest.gather(1, size - 1)  # (P, 1) weight of the last of them
    num_tied = size - (heaviest > lightest).sum(
        dim=-1, keepdim=True
    )  # (P, 1) tokens of that weight that stay
    is_tied = weights == lightest
    dropped = (weights < lightest) | (is_tied & (is_tied.cumsum(dim=-1) > num_tied))
    weights.masked_fill_(dropped & (top_p < 1), 0)
