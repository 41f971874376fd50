"""The sampler against probabilities worked out in float64 by numpy, and against transformers' own filters."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.layers.sampler import Sampler, make_generator, token_weights
from minivllm.sampling_params import SamplingParams

VOCAB = 12
EOS = 4
FILTERS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "all": {"temperature": 1.7, "min_p": 0.05, "top_k": 6, "top_p": 0.8},
}


def oracle_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution by its definition, one token at a time. (V,) -> (V,) float64, sums to 1"""
    scaled = np.asarray(logits, dtype=np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    kept = {token for token in range(len(probs)) if probs[token] >= params.min_p * probs.max()}
    if params.top_k > 0:
        kept = {token for token in kept if sum(probs[other] > probs[token] for other in kept) < params.top_k}
    mass = sum(probs[token] for token in kept)
    nucleus, reached = set(), 0.0
    for token in sorted(kept, key=lambda token: (-probs[token], token)):
        if params.top_p < 1 and reached >= params.top_p * mass:
            break
        nucleus.add(token)
        reached += probs[token]
    probs = np.array([probs[token] if token in nucleus else 0.0 for token in range(len(probs))])
    return probs / probs.sum()


def distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    weights = token_weights(logits, params).numpy()
    return weights / weights.sum()


def sample(sampler: Sampler, logits: torch.Tensor, rows, generators=None, num_output_tokens=None):
    none, zeros = [None] * len(rows), [0] * len(rows)
    return sampler(logits, rows, generators or none, num_output_tokens or zeros)


def bumpy_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 2.0 * torch.randn(rows, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_greedy_takes_the_likeliest_token(dtype):
    logits = bumpy_logits(1, rows=5, vocab=300).to(dtype)
    rows = [SamplingParams(temperature=0, top_k=3, top_p=0.5, seed=i) for i in range(5)]

    output = sample(Sampler(), logits, rows)

    assert output.token_ids.tolist() == [int(np.argmax(row)) for row in logits.double().numpy()]
    assert output.logprobs == [None] * 5


def test_float64_logits_keep_their_precision():
    logits = torch.zeros(2, 5, dtype=torch.float64)
    logits[0, 3] = logits[1, 2] = 1e-12
    rows = [SamplingParams(temperature=0, logprobs=5), SamplingParams(top_k=1)]

    output = sample(Sampler(), logits, rows)

    assert output.token_ids.tolist() == [3, 2]
    above = output.logprobs[0][3].logprob - output.logprobs[0][0].logprob
    assert above == pytest.approx(1e-12, rel=1e-3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.floats(-6, 6), min_size=1, max_size=20),
    temperature=st.floats(0.1, 5),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    top_k=st.integers(-1, 25),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
)
def test_filters_leave_the_distribution_of_their_definition(logits, temperature, min_p, top_k, top_p):
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)

    ours = distribution(torch.tensor(logits, dtype=torch.float64), params)

    np.testing.assert_allclose(ours, oracle_distribution(np.array(logits), params), rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def transformers_filters():
    from transformers.generation import logits_process

    return logits_process


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_large_vocabulary_is_filtered_as_transformers_does(transformers_filters, top_p):
    logits = bumpy_logits(2, rows=3, vocab=20_000)
    params = SamplingParams(temperature=0.8, min_p=1e-4, top_k=5000, top_p=top_p)
    filters = [
        transformers_filters.TemperatureLogitsWarper(0.8),
        transformers_filters.MinPLogitsWarper(1e-4),
        transformers_filters.TopKLogitsWarper(5000),
        transformers_filters.TopPLogitsWarper(top_p),
    ]

    expected = logits
    for each in filters:
        expected = each(None, expected)
    expected = expected.softmax(dim=-1).numpy()

    for row in range(3):
        np.testing.assert_allclose(distribution(logits[row], params), expected[row], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("filters", [FILTERS["plain"], FILTERS["all"]], ids=["plain", "all"])
def test_tokens_are_drawn_as_often_as_their_probability_says(filters):
    draws = 4000
    params = SamplingParams(**filters)
    logits = bumpy_logits(3)

    tokens = sample(Sampler(seed=5), logits.expand(draws, -1), [params] * draws).token_ids

    expected = draws * oracle_distribution(logits[0].numpy(), params)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_successive_draws_of_a_seeded_request_are_independent():
    draws, params = 6000, SamplingParams(seed=11)
    logits, generator, sampler = bumpy_logits(4, vocab=3), make_generator(params), Sampler()

    tokens = [int(sample(sampler, logits, [params], [generator]).token_ids) for _ in range(draws)]

    once = oracle_distribution(logits[0].numpy(), params)
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    expected = draws * np.outer(once, once)
    assert ((pairs - expected) ** 2 / expected).sum() < 8 + 4 * math.sqrt(2 * 8)


EDGES = {
    "tokens tied with the last of top_k stay": ([1, 4, 2, 2, 2, 0.5], {"top_k": 2}, [1, 2, 3, 4]),
    "top_p keeps the smallest set that reaches it": ([1, 4, 2, 1], {"top_p": 0.49}, [1]),
    "which it reaches exactly": ([1, 4, 2, 1], {"top_p": 0.5}, [1]),
    "or not quite": ([1, 4, 2, 1], {"top_p": 0.51}, [1, 2]),
    "of tied tokens it takes the first": ([1, 4, 2, 1], {"top_p": 0.76}, [0, 1, 2]),
    "of a flat distribution its share and no more": ([1] * 4096, {"top_p": 0.5}, list(range(2048))),
    "a token exactly at min_p stays": ([0.5, 0.25, 0.2499, 0.0001], {"min_p": 0.5}, [0, 1]),
}


@pytest.mark.parametrize(("weights", "filters", "kept"), EDGES.values(), ids=EDGES)
def test_at_the_edges_of_filters(weights, filters, kept):
    logits = torch.tensor(weights, dtype=torch.float64).log()

    assert token_weights(logits, SamplingParams(**filters)).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_narrowest_filter_still_leaves_the_likeliest_token(filters):
    logits = bumpy_logits(6, rows=4)

    tokens = sample(Sampler(), logits, [SamplingParams(**filters)] * 4).token_ids

    assert tokens.tolist() == logits.argmax(dim=-1).tolist()


def test_a_draw_of_zero_takes_no_excluded_token(monkeypatch):
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 0.5]])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros((), dtype=torch.float64))

    assert sample(Sampler(), logits, [SamplingParams()]).token_ids.tolist() == [1]


def test_a_seeded_request_gets_its_tokens_whatever_it_is_batched_with():
    steps, rng = 25, np.random.default_rng(7)
    requests = {name: SamplingParams(seed=seed, **FILTERS[name]) for seed, name in enumerate(FILTERS)}
    logits = {name: bumpy_logits(20 + i, rows=steps).float() for i, name in enumerate(FILTERS)}
    others = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(logprobs=2)]

    alone = {name: [] for name in requests}
    for name, params in requests.items():
        sampler, generator = Sampler(seed=1), make_generator(params)
        for step in range(steps):
            alone[name] += sample(sampler, logits[name][step, None], [params], [generator]).token_ids.tolist()

    mixed, sampler = {name: [] for name in requests}, Sampler(seed=2)
    generators = {name: make_generator(params) for name, params in requests.items()}
    while waiting := [name for name in requests if len(mixed[name]) < steps]:
        some = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
        batch = [(name, logits[name][len(mixed[name])], requests[name], generators[name]) for name in some]
        batch += [(None, torch.zeros(VOCAB), params, None) for params in others]
        names, *columns = zip(*(batch[i] for i in rng.permutation(len(batch))))
        tokens = sample(sampler, torch.stack(columns[0]), *columns[1:]).token_ids.tolist()
        for name, token in zip(names, tokens):
            if name is not None:
                mixed[name].append(token)

    assert mixed == alone


def test_different_seeds_give_different_tokens():
    logits = torch.zeros(1, 1000)

    tokens = set()
    for seed in range(20):
        params = SamplingParams(seed=seed)
        tokens.add(int(sample(Sampler(), logits, [params], [make_generator(params)]).token_ids))

    assert len(tokens) > 15


def test_requests_without_a_seed_follow_the_engines_seed_each_on_its_own():
    logits = torch.zeros(50, 1000)
    rows = [SamplingParams()] * 50

    first, again, other = (sample(Sampler(seed=seed), logits, rows).token_ids.tolist() for seed in (3, 3, 4))

    assert first == again
    assert first != other
    assert len(set(first)) > 40


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nothing_stops_a_request_before_min_tokens(temperature):
    logits = torch.full((4, VOCAB), -20.0)
    logits[:, EOS], logits[:, 7], logits[:, 2] = 9.0, 8.0, 5.0
    params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=[7], logprobs=1)
    before = logits.clone()

    output = sample(Sampler([EOS]), logits, [params] * 4, num_output_tokens=[0, 2, 3, 9])

    assert output.token_ids.tolist()[:2] == [2, 2]
    assert set(output.token_ids.tolist()[2:]) <= {EOS, 7}
    assert torch.equal(logits, before)
    assert set(output.logprobs[0]) == {2, EOS}, "logprobs are the model's own, not the masked ones"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logprobs_are_the_models_own(dtype):
    logits = bumpy_logits(8, rows=6, vocab=50).to(dtype)
    asked = [0, 1, 5, None, 50, 3]
    rows = [SamplingParams(temperature=2.5, top_p=0.9, seed=i, logprobs=n) for i, n in enumerate(asked)]

    output = sample(Sampler(), logits, rows, [make_generator(params) for params in rows])

    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    for row, num in enumerate(asked):
        if num is None:
            assert output.logprobs[row] is None
            continue
        token, found = int(output.token_ids[row]), output.logprobs[row]
        by_rank = np.argsort(-expected[row], kind="stable")
        if dtype != torch.bfloat16:  # whose ties leave a choice
            assert list(found) == [token, *(t for t in by_rank[:num].tolist() if t != token)]
        for each, logprob in found.items():
            assert logprob.logprob == pytest.approx(expected[row, each], rel=1e-12)
            assert logprob.rank == 1 + (expected[row] > expected[row, each]).sum()
            assert logprob.decoded_token is None


def test_tied_tokens_share_a_rank():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 0.0]])
    params = SamplingParams(temperature=0, logprobs=5)

    found = sample(Sampler(), logits, [params]).logprobs[0]

    assert {token: logprob.rank for token, logprob in found.items()} == {1: 1, 3: 1, 0: 3, 2: 3, 4: 5}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_a_row_of_nan_harms_no_other_row(filters):
    logits = bumpy_logits(9, rows=3)
    rows = [SamplingParams(seed=i, **filters) for i in range(3)]
    healthy = sample(Sampler(), logits, rows, [make_generator(params) for params in rows]).token_ids.tolist()

    logits[1] = float("nan")
    tokens = sample(Sampler(), logits, rows, [make_generator(params) for params in rows]).token_ids.tolist()

    assert [tokens[0], tokens[2]] == [healthy[0], healthy[2]]
    assert 0 <= tokens[1] < VOCAB
