"""All draws of a step at once: the tokens that the rows would draw one by one."""

import random

import pytest
import torch

from minivllm import SamplingParams
from minivllm.layers.batched_draw import draw_tokens
from minivllm.layers.sampler import draw_token

FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.3},
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 7},
    "top_k of all": {"top_k": 4000},
    "top_p": {"top_p": 0.6},
    "all": {"temperature": 1.7, "min_p": 0.01, "top_k": 40, "top_p": 0.8},
}


def generators(count, seed):
    return [torch.Generator().manual_seed(100 * seed + i) for i in range(count)]


def one_by_one(logits, rows, seed):
    return [draw_token(row, p, g) for row, p, g in zip(logits, rows, generators(len(rows), seed))]


def random_logits(rows, size, seed, scale=2.0, rounded=False):
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.bfloat16() if rounded else logits


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16, so with ties"])
@pytest.mark.parametrize("name", FILTERS)
def test_equals_the_rows_drawn_one_by_one(name, rounded):
    rows = [SamplingParams(**FILTERS[name])] * 40

    for seed in range(5):
        logits = random_logits(len(rows), 500, seed, rounded=rounded)

        assert draw_tokens(logits, rows, generators(len(rows), seed)).tolist() == one_by_one(
            logits, rows, seed
        )


@pytest.mark.parametrize("seed", range(8))
def test_rows_with_filters_of_their_own_do_not_touch_each_other(seed):
    rng = random.Random(seed)
    rows = [
        SamplingParams(
            temperature=rng.choice([0.2, 1.0, 3.0]),
            min_p=rng.choice([0, 0, 0.1]),
            top_k=rng.choice([-1, 0, 1, 5, 2000]),
            top_p=rng.choice([1.0, 0.9, 0.3, 1e-6]),
        )
        for _ in range(60)
    ]
    logits = random_logits(len(rows), 300, seed, rounded=seed % 2 == 1)

    assert draw_tokens(logits, rows, generators(len(rows), seed)).tolist() == one_by_one(logits, rows, seed)


def test_a_row_of_nan_spoils_no_other_and_infinities_are_masked():
    logits = random_logits(4, 50, 1)
    logits[1] = float("nan")
    logits[2, :45] = float("-inf")
    rows = [SamplingParams(top_p=0.9)] * 4

    drawn = draw_tokens(logits, rows, generators(4, 1)).tolist()

    assert drawn == one_by_one(logits, rows, 1)
    assert drawn[2] >= 45


def test_rows_without_a_seed_take_their_numbers_in_order():
    logits, shared, alone = random_logits(6, 40, 2), *(torch.Generator().manual_seed(9) for _ in range(2))
    rows = [SamplingParams()] * 6

    drawn = draw_tokens(logits, rows, [shared] * 6).tolist()

    assert drawn == [draw_token(row, rows[0], alone) for row in logits]
