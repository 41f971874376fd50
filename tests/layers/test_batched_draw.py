"""All draws of a step at once: the tokens that the rows would draw one by one."""

import random

import pytest
import torch

from minivllm import SamplingParams
from minivllm.layers.batched_draw import draw_tokens
from minivllm.layers.sampler import draw_token


def generators(count, seed):
    return [torch.Generator().manual_seed(100 * seed + i) for i in range(count)]


def one_by_one(logits, rows, seed):
    return [draw_token(row, p, g) for row, p, g in zip(logits, rows, generators(len(rows), seed))]


def random_logits(rows, size, seed, scale=2.0, rounded=False):
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.bfloat16() if rounded else logits


@pytest.mark.parametrize("seed", range(10))
def test_rows_with_any_filters_draw_what_each_draws_alone(seed):
    """Every second time in bfloat16, so with ties."""
    rng = random.Random(seed)
    rows = [
        SamplingParams(
            temperature=rng.choice([0.2, 1.0, 1.7, 3.0]),
            min_p=rng.choice([0, 0, 0.01, 0.2]),
            top_k=rng.choice([-1, 0, 1, 5, 40, 2000]),
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
