"""Experts run on the tokens that chose them, and their answers are put together, whatever the batch."""

import numpy as np
import pytest
import torch

from minivllm.layers.fused_moe import FusedMoE

HIDDEN, INNER = 12, 20
# Number of experts, and how many of them a token runs.
SHAPES = [(1, 1), (4, 1), (5, 2), (7, 3), (4, 4)]


def experts(num_experts, top_k, renormalize=True, dtype=torch.float64):
    layer = FusedMoE(num_experts, top_k, HIDDEN, INNER, renormalize, dtype)
    generator = torch.Generator().manual_seed(num_experts)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def batch(tokens, num_experts, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    sizes = (tokens, HIDDEN), (tokens, num_experts)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def one_by_one(layer, x, router_logits):
    """Token by token and expert by expert, in numpy."""
    x, logits, w13, w2 = (t.double().numpy() for t in (x, router_logits, layer.w13_weight, layer.w2_weight))
    output = np.zeros_like(x)
    for token in range(len(x)):
        likelihood = np.exp(logits[token]) / np.exp(logits[token]).sum()
        chosen = np.argsort(-likelihood)[: layer.top_k]
        total = likelihood[chosen].sum() if layer.renormalize else 1.0
        for expert in chosen:
            gate, up = w13[expert, :INNER] @ x[token], w13[expert, INNER:] @ x[token]
            answer = w2[expert] @ (gate / (1 + np.exp(-gate)) * up)
            output[token] += likelihood[expert] / total * answer
    return output


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
def test_each_token_gets_the_weighted_answers_of_its_experts(num_experts, top_k, tokens, renormalize):
    layer = experts(num_experts, top_k, renormalize)
    x, router_logits = batch(tokens, num_experts)

    actual = layer(x, router_logits)

    np.testing.assert_allclose(actual, one_by_one(layer, x, router_logits), rtol=0, atol=1e-11)


def test_experts_that_no_token_chose_have_no_pairs_and_change_nothing():
    layer = experts(6, 2)
    x, router_logits = batch(9, 6)
    router_logits[:, [0, 3, 5]] = -50.0
    layer.w13_weight[[0, 3, 5]] = float("nan")

    pairs, actual = layer.route(router_logits), layer(x, router_logits)

    assert (pairs.counts == 0).tolist() == [True, False, False, True, False, True]
    np.testing.assert_allclose(actual, one_by_one(layer, x, router_logits), rtol=0, atol=1e-11)


def test_pairs_lie_by_expert_and_then_by_token():
    layer = experts(7, 3)
    _, router_logits = batch(40, 7)
    weights, ids = layer.select_experts(router_logits)

    pairs = layer.route(router_logits)

    flat = [
        (expert, token, weight)
        for token in range(40)
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True)
    ]
    found = zip(pairs.experts.tolist(), pairs.rows.tolist(), pairs.weights.tolist(), strict=True)
    assert list(found) == sorted(flat)
    assert pairs.counts.tolist() == [sum(expert == e for expert, _, _ in flat) for e in range(7)]
    assert torch.equal(pairs.experts[pairs.places].view(40, 3), ids)
    assert torch.equal(pairs.rows[pairs.places].view(40, 3), torch.arange(40)[:, None].expand(40, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_experts_are_chosen_in_float32_or_better(dtype):
    # In bfloat16 both likelihoods round to 0.5, and the weights with them.
    router_logits = torch.tensor([[0.0, 1 / 256]]).to(dtype)

    weights, ids = experts(2, 1, renormalize=False, dtype=dtype).select_experts(router_logits)

    assert ids.tolist() == [[1]]
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert weights.item() == pytest.approx(1 / (1 + np.exp(-1 / 256)), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_tokens_answers_are_summed_alike_in_every_batch(dtype):
    layer = experts(7, 5, dtype=dtype)
    _, router_logits = batch(30, 7, dtype=dtype)
    answers = torch.randn(30, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)

    def combined(tokens):
        pairs = layer.route(router_logits[tokens])
        y = torch.empty(len(tokens) * 5, HIDDEN, dtype=dtype)
        y[pairs.places] = answers[tokens].flatten(0, 1)
        return layer.combine(y, pairs)

    everything = combined(list(range(30)))
    mixed = combined([17, 3, 29, 4])

    assert everything.dtype == dtype
    assert torch.equal(mixed, everything[[17, 3, 29, 4]])
    assert torch.equal(torch.cat([combined([token]) for token in range(30)]), everything)


def test_half_precision_is_rounded_once_when_everything_is_summed():
    layer = experts(7, 5, dtype=torch.bfloat16)
    _, router_logits = batch(30, 7, dtype=torch.bfloat16)
    pairs = layer.route(router_logits)
    y = torch.randn(150, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    actual = layer.combine(y, pairs)

    exact = torch.zeros(30, HIDDEN, dtype=torch.float64)
    exact.index_add_(0, pairs.rows, y.double() * pairs.weights.double()[:, None])
    assert torch.equal(actual, exact.to(torch.bfloat16))
