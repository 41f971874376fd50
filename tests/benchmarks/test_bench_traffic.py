"""Random traffic has the rate, the popularity and the lengths that were asked for."""

import numpy as np
import pytest

from minivllm.simulate.traffic import Lengths, make_traffic, zipf_shares

PROMPT, OUTPUT = Lengths(100, 0.8, 8, 400), Lengths(50, 0.5, 2, 200)


def traffic(**changes):
    values = {"requests": 4000, "rate": 20.0, "adapters": 5, "alpha": 1.0, "prompt": PROMPT, "output": OUTPUT}
    return make_traffic(**{**values, **changes})


def test_gaps_between_arrivals_are_exponential_with_the_rate():
    times = np.array([arrival.time_s for arrival in traffic()])

    gaps = np.diff(times)

    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)  # of an exponential, both are the same
    assert np.median(gaps) == pytest.approx(np.log(2) / 20, rel=0.06)


def test_popularity_falls_as_zipf_says():
    counts = np.bincount([arrival.adapter for arrival in traffic()], minlength=5)

    expected = 4000 / np.arange(1, 6) / sum(1 / i for i in range(1, 6))
    assert counts == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("alpha", [0.0, 0.7, 2.0])
def test_shares_sum_to_one_and_keep_their_ratio(alpha):
    shares = zipf_shares(7, alpha)

    assert shares.sum() == pytest.approx(1)
    assert shares[0] / shares[6] == pytest.approx(7**alpha)


def test_lengths_are_whole_within_their_limits_and_around_their_median():
    prompts = [arrival.prompt_tokens for arrival in traffic()]

    assert all(type(length) is int and 8 <= length <= 400 for length in prompts)
    assert np.median(prompts) == pytest.approx(100, rel=0.06)
    assert max(prompts) == 400 and min(prompts) < 20
