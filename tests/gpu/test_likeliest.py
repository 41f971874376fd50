"""The likeliest token of each row, beside a walk through its numbers."""

import math

import numpy as np
import pytest
import torch

from minivllm.gpu.kernels.likeliest import keep_likeliest
from tests.tools.device import DEVICE

DTYPES = [torch.float16, torch.float32, torch.float64]  # bfloat16 where the interpreter does not compute it
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)


def random_logits(rows, width, dtype, seed):
    """Few different numbers: the largest is there more than once."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(-9, 9, size=(rows, width)) / 4).to(dtype)


def first_of_largest(row):
    best = 0
    for column, number in enumerate(row):
        if number > row[best]:
            best = column
    return best


def found(logits, gap=0):
    """Tokens and what is kept, where rows are further apart than they are wide."""
    logits = logits.to(DEVICE)
    apart = logits.new_full((len(logits), logits.shape[1] + gap), math.nan)[:, : logits.shape[1]]
    apart.copy_(logits)
    kept = torch.full_like(torch.cat([logits, logits[:, :gap]], dim=1), 7.0)
    tokens = torch.full((len(logits) + 1,), -5, dtype=torch.long, device=DEVICE)
    keep_likeliest(apart, kept[:, : logits.shape[1]], tokens[:-1])
    assert tokens[-1] == -5
    assert (kept[:, logits.shape[1] :] == 7.0).all()
    return tokens[:-1].tolist(), kept[:, : logits.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "gap"), [(1, 1, 0), (3, 1024, 0), (5, 1000, 24), (4, 5000, 3)])
def test_of_equal_numbers_it_is_the_first(rows, width, gap, dtype):
    logits = random_logits(rows, width, dtype, seed=width)

    tokens, kept = found(logits, gap)

    assert tokens == [first_of_largest(row) for row in logits.tolist()]
    assert torch.equal(kept.cpu(), logits)


def test_rows_that_bar_tokens_or_overflow_have_a_token_too():
    inf = math.inf
    rows = [[-inf, -inf, -3.0], [-inf] * 3, [-0.0, 0.0, -1.0], [1.0, inf, inf], [1.0, math.nan, inf]]

    tokens, kept = found(torch.tensor(rows))

    assert tokens == [2, 0, 0, 1, 1]
    assert torch.equal(kept.cpu().nan_to_num(5.0), torch.tensor(rows).nan_to_num(5.0))
