"""Traffic to simulate: times, sessions and adapters are as asked for; the traces are there."""

from collections import Counter

import numpy as np
import pytest

from minivllm.simulate.traffic import (
    Arrival,
    bursts,
    by_bursts,
    by_hotspot,
    by_long_tail,
    by_tenant,
    by_thrash,
    diurnal,
    read_trace,
    repeated,
    with_adapters,
    with_sessions,
    with_times,
)


def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize("make", [bursts, diurnal])
def test_times_rise_and_keep_the_mean_rate(make):
    times = make(57_600, 8.0, rng())  # two hours

    assert (np.diff(times) >= 0).all()
    assert 57_600 / times[-1] == pytest.approx(8.0, rel=0.06)


def test_bursts_are_burstier_than_independent_arrivals():
    gaps = np.diff(bursts(20_000, 8.0, rng()))

    assert gaps.std() > 2 * gaps.mean()  # of an exponential, both are the same


def test_a_days_rate_swings_by_its_depth():
    times = diurnal(40_000, 10.0, rng(), period_s=1000, depth=0.6)

    in_period = np.histogram(times % 1000, bins=4)[0]
    share = in_period / in_period.sum()
    # A quarter of 1 + 0.6 sin around its top: 1 + 0.6 * 2 / pi.
    assert share[0] / share[2] == pytest.approx((1 + 0.382) / (1 - 0.382), rel=0.08)


def test_an_hour_of_each_trace_is_there():
    conversation, code = read_trace("azure-2023-conv"), read_trace("azure-2023-code")

    assert (len(conversation), len(code)) == (19_366, 8_819)
    assert (conversation[1].prompt_tokens, conversation[1].output_tokens) == (396, 109)
    assert np.mean([arrival.prompt_tokens for arrival in code]) == pytest.approx(2047.8, abs=0.1)
    with pytest.raises(ValueError, match="there is no trace 'x'; known are azure-2023-conv"):
        read_trace("x")


def test_a_trace_is_repeated_at_another_rate():
    trace = read_trace("azure-2023-code")

    longer = repeated(trace, 20_000, rate=10.0)

    times = [arrival.time_s for arrival in longer]
    assert len(longer) == 20_000 and times == sorted(times)
    assert longer[8_819].prompt_tokens == trace[0].prompt_tokens
    assert times[8_818] == pytest.approx(881.8, rel=1e-6)


def test_an_adapter_is_hot_for_a_while():
    times = np.arange(0, 1200, 0.1)

    picks = by_bursts(times, 500, 0.0, rng(), hot_s=300)

    hottest = [Counter(picks[i : i + 3000].tolist()).most_common(1)[0] for i in range(0, 12_000, 3000)]
    assert all(count == pytest.approx(1500, rel=0.1) for _, count in hottest)
    assert len({adapter for adapter, _ in hottest}) == 4


def test_tenants_have_adapters_of_their_own():
    picks = by_tenant(np.arange(20_000), 12, 1.0, rng(), tenants=3)

    counts = np.sort(np.bincount(picks, minlength=12))[::-1].reshape(3, 4).sum(1) / 20_000
    assert counts == pytest.approx(np.array([1, 1 / 2, 1 / 3]) / (11 / 6), rel=0.05)


def test_a_sessions_prompts_hold_what_was_said():
    first = [Arrival(i / 2, 100 + i, 20, 3) for i in range(400)]

    traffic = with_sessions(with_adapters(first, "zipf", 5, 1.0), turns=4, longest=600)

    assert len(traffic) == 400
    assert [a.time_s for a in traffic] == sorted(a.time_s for a in traffic)
    of_session = {}
    for arrival in traffic:
        of_session.setdefault(arrival.session, []).append(arrival)
    for turns in of_session.values():
        new = turns[0].prompt_tokens
        assert [t.prompt_tokens for t in turns] == [new + i * (new + 20) for i in range(len(turns))]
        assert len({turn.adapter for turn in turns}) == 1
        assert turns[-1].prompt_tokens + turns[-1].output_tokens <= 600
    assert max(map(len, of_session.values())) > 2


def test_the_seed_decides():
    arrivals = [Arrival(i, 10 + i, 5, None) for i in range(50)]

    made = [
        with_adapters(with_times(arrivals, "bursts", 2.0, seed), "tenants", 9, 1.0, seed)
        for seed in (1, 1, 2)
    ]

    assert made[0] == made[1] != made[2]


def test_a_hotspot_is_one_adapter_that_gets_most_requests_all_the_time():
    picks = by_hotspot(np.arange(20_000.0), 50, 1.0, rng())

    [(hot, count), *_] = Counter(picks.tolist()).most_common()
    first, second = ((half == hot).mean() for half in np.split(picks, 2))
    assert count / 20_000 == pytest.approx(0.6, abs=0.1)  # and what it has by Zipf
    assert first == pytest.approx(second, abs=0.02)


def test_thrash_is_one_round_after_the_other():
    picks = by_thrash(np.arange(6_000.0), 60, 1.0, rng())

    same_place = (picks[60:] == picks[:-60]).mean()
    assert same_place == pytest.approx(0.8**2, abs=0.03)  # neither of the two strays
    assert len(set(picks.tolist())) == 60


def test_a_long_tail_gets_as_many_requests_as_the_few_popular_ones():
    picks = by_long_tail(np.arange(40_000.0), 400, 1.0, rng())

    counts = np.bincount(picks, minlength=400)
    assert counts[:20].sum() / 40_000 == pytest.approx(0.5, abs=0.01)
    assert counts[20:].min() > 0 and counts[20:].max() < 2 * counts[20:].mean()
    assert set(by_long_tail(np.arange(99.0), 1, 1.0, rng()).tolist()) == {0}
