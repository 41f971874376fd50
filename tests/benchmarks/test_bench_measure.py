"""Statistics of steps, on steps made by hand."""

import pytest

from benchmarks.measure import (
    Step,
    decode_summary,
    full_decode_steps,
    gaps,
    median_of,
    percentiles,
    prompt_steps,
    token_times,
)

# Two requests; the prompt of b is too long for the first step. Seconds: 4, 3, 1, 2, 1, 5.
STEPS = [
    Step(100.0, 104.0, ("a",)),  # a's prompt, and a piece of b's
    Step(104.0, 107.0, ("a", "b")),  # b's prompt ends while a decodes
    Step(107.0, 108.0, ("a", "b")),
    Step(108.0, 110.0, ("b", "a")),
    Step(110.0, 111.0, ("a", "b")),
    Step(111.0, 116.0, ("b",)),  # a is done
]


def test_only_steps_in_which_all_requests_decode_count():
    assert full_decode_steps(STEPS, 2) == STEPS[2:5]


def test_the_throughput_is_the_tokens_of_those_steps_by_their_time():
    summary = decode_summary(STEPS, 2)

    assert summary["tokens_per_second"] == pytest.approx(2 * 3 / (1 + 2 + 1))
    assert summary["step_ms"] == pytest.approx(1000)


def test_prefill_lasts_until_the_last_request_has_its_first_token():
    summary = decode_summary(STEPS, 2)

    assert summary["prefill_ms"] == pytest.approx(7000)
    assert summary["ttft_p50_ms"] == pytest.approx((4000 + 7000) / 2)


def test_a_step_in_which_somebody_decodes_is_no_prompt_step():
    chunk = Step(99.0, 100.0, ())
    prompt_of_a_preempted_request = Step(116.0, 117.0, ())

    assert prompt_steps([chunk, *STEPS, prompt_of_a_preempted_request], 2) == [chunk, STEPS[0]]
    assert decode_summary([chunk, *STEPS], 2)["prompt_steps_ms"] == pytest.approx(5000)


def test_gaps_are_between_tokens_of_the_same_request():
    assert sorted(gaps(token_times(STEPS))) == [1, 1, 1, 1, 2, 2, 3, 5]


def test_without_a_step_in_which_all_decode_there_is_no_throughput():
    with pytest.raises(ValueError, match="more output tokens"):
        decode_summary(STEPS[:2], 2)


def test_percentiles_are_in_milliseconds():
    found = percentiles("x", [i / 1000 for i in range(101)])

    assert found == {"x_p50_ms": pytest.approx(50), "x_p99_ms": pytest.approx(99)}


def test_medians_are_taken_entry_by_entry():
    passes = [{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 7.0}, {"a": 2.0, "b": 8.0}]

    assert median_of(passes) == {"a": 2.0, "b": 8.0}
