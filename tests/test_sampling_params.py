"""SamplingParams refuses what cannot be served, in one sentence that names the field and the value."""

from fractions import Fraction

import numpy as np
import pytest

from minivllm.engine.input_processor import check_sampling
from minivllm.sampling_params import SamplingParams

REFUSED = {
    "n": [0, 129, 1.0, True],
    "presence_penalty": [-2.01, 2.01, float("nan"), float("inf"), "1", None, True],
    "frequency_penalty": [-2.01, 2.01, float("nan"), float("-inf"), "1", None, True],
    "repetition_penalty": [0, -0.5, float("nan"), float("inf"), "1", None, True],
    "logit_bias": [5, [5], "5", {-1: 1.0}, {1.0: 1.0}, {"5": 1.0}, {True: 1.0}, {5: None}, {5: float("nan")}],
    "temperature": [-0.1, float("nan"), float("inf"), "1", None, True, 1j, [1]],
    "top_p": [0, -0.5, 1.01, float("nan"), "0.9", None],
    "top_k": [-2, 1.5, "5", None, True, 2**63],
    "min_p": [-0.01, 1.01, float("nan"), None],
    "seed": [-1, 2**64, 1.0, "7", True],
    "stop": ["", ["a", ""], 3, [3], {"a": 1}],
    "stop_token_ids": [[-1], [1.0], ["2"], 2, "12", [True]],
    "ignore_eos": [1, None],
    "max_tokens": [0, -1, 1.0, "1", True],
    "min_tokens": [-1, 17, 1.0, None],
    "logprobs": [-1, 1.0, "1", True],
    "prompt_logprobs": [-1, 1.0, "1", True],
    "include_stop_str_in_output": ["yes"],
    "skip_special_tokens": [0],
    "detokenize": ["no"],
}
ALLOWED = {
    "n": [1, 2, 128],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0, 2],
    "repetition_penalty": [1e-300, 1, 1e300],
    "logit_bias": [None, {}, {0: -100}, {5: 1e300, 6: 0.5}],
    "temperature": [0, 0.0, 1e-9, 2, 100.0],
    "top_p": [1, 1e-9, 0.5],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 1, 0.05],
    "seed": [None, 0, 2**64 - 1],
    "stop": [None, "a", ["a", "bc"], ("a",), []],
    "stop_token_ids": [None, [0, 5], (3,), []],
    "max_tokens": [None, 1, 10**6],
    "min_tokens": [0, 16],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
}


def cases(table: dict) -> list[tuple]:
    return [pytest.param(name, value, id=f"{name}={value!r}") for name in table for value in table[name]]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**{name: value})

    assert name in str(refusal.value)
    assert repr(value) in str(refusal.value)


HUGE = 10**400  # an int that no float holds; of more than 4,300 digits it cannot even be shown


@pytest.mark.parametrize("value", [HUGE, HUGE**20, -HUGE], ids=["400 digits", "8,000 digits", "negative"])
@pytest.mark.parametrize(
    "name",
    [
        *["temperature", "top_p", "min_p", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "n"],
        *["presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs"],
    ],
)
def test_a_number_that_nothing_holds_is_refused_in_a_short_sentence(name, value):
    with pytest.raises(ValueError, match=name) as refusal:
        SamplingParams(**{name: value})

    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "logit_bias", [{HUGE: 1.0}, {5: HUGE}, {-HUGE: 0}, {5: -HUGE}], ids=["id", "bias"] * 2
)
def test_a_bias_that_nothing_holds_is_refused_in_a_short_sentence(logit_bias):
    with pytest.raises(ValueError, match="logit_bias") as refusal:
        SamplingParams(logit_bias=logit_bias)

    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "logprobs", "prompt_logprobs"])
def test_a_count_that_no_tensor_holds_is_told_how_large_it_may_be(name):
    with pytest.raises(ValueError, match=rf"{name} must be at most {2**63 - 1}, got {2**63}"):
        SamplingParams(**{name: 2**63})


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("temperature", 2**64, 2.0**64),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", Fraction(1, 4), 0.25),
        ("top_p", 1, 1.0),
        ("min_p", np.float64(0.25), 0.25),
        ("top_k", np.int64(7), 7),
        ("max_tokens", np.int32(7), 7),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("stop_token_ids", [np.int64(3), 3, 4], [3, 4]),
        ("stop", ["a", "b", "a"], ["a", "b"]),
        ("presence_penalty", 1, 1.0),
        ("repetition_penalty", np.float32(1.5), 1.5),
    ],
)
def test_numbers_are_kept_in_the_type_that_is_used(field, value, kept):
    found = getattr(SamplingParams(**{field: value}), field)

    assert found == kept
    assert type(found) is type(kept)
    assert not isinstance(found, list) or all(type(a) is type(b) for a, b in zip(found, kept))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("stop", [f"stop {i}" for i in range(65)], "64 at most, got 65"),
        ("stop", "x" * 1025, "at most 1024 characters, got one of 1025"),
        ("stop", ["ok", "x" * 10**6], "got one of 1000000"),
        ("stop_token_ids", list(range(1025)), "1024 at most, got 1025"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "1024 at most, got 1025"),
    ],
)
def test_what_everybody_would_wait_for_is_bounded(field, value, says):
    with pytest.raises(ValueError, match=says) as refusal:
        SamplingParams(**{field: value})

    assert field in str(refusal.value) and len(str(refusal.value)) < 300


def test_as_much_as_is_allowed_is_allowed():
    SamplingParams(stop=[f"{i:04}" * 256 for i in range(64)], stop_token_ids=list(range(1024)))
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0))


@pytest.mark.parametrize(("name", "value"), cases(ALLOWED))
def test_a_value_at_the_edge_of_its_range_is_allowed(name, value):
    SamplingParams(**{name: value})


def test_stops_are_kept_as_lists_of_their_own():
    ids = [7, 8]

    params = SamplingParams(stop="END", stop_token_ids=ids)
    ids.append(9)

    assert params.stop == ["END"]
    assert params.stop_token_ids == [7, 8]
    assert SamplingParams().stop == []
    assert SamplingParams().stop_token_ids == []


def test_parameters_cannot_change_under_a_running_request():
    params = SamplingParams()

    with pytest.raises(AttributeError):
        params.max_tokens = 0


def test_stop_strings_without_text_are_refused():
    with pytest.raises(ValueError, match=r"END.*detokenize"):
        SamplingParams(stop="END", detokenize=False)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_a_temperature_of_almost_zero_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_stop_ids_outside_the_vocabulary_are_named():
    params = SamplingParams(stop_token_ids=[3, 100, 4000])

    check_sampling(params, 4001)
    with pytest.raises(ValueError, match=r"stop_token_ids \[100, 4000\].*99"):
        check_sampling(params, 100)


def test_biased_ids_outside_the_vocabulary_are_named():
    params = SamplingParams(logit_bias={3: 1.0, 100: -5.0, 4000: 2.5})

    check_sampling(params, 4001)
    with pytest.raises(ValueError, match=r"logit_bias \[100, 4000\].*99"):
        check_sampling(params, 100)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens_are_refused(name):
    params = SamplingParams(**{name: 11})

    check_sampling(params, 11)
    with pytest.raises(ValueError, match=rf"{name} is 11.*10"):
        check_sampling(params, 10)


def test_biases_are_kept_as_numbers_of_their_own():
    biases = {np.int64(5): 1, 7: np.float32(0.5)}

    params = SamplingParams(logit_bias=biases)
    biases[9] = 2.0

    assert params.logit_bias == {5: 1.0, 7: 0.5}
    assert [type(x) for item in params.logit_bias.items() for x in item] == [int, float] * 2


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        ({}, False),
        ({"logit_bias": {}}, False),
        ({"logit_bias": {5: 0.0}}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"top_k": 3, "temperature": 0.5, "min_tokens": 2}, False),
    ],
    ids=str,
)
def test_who_asks_for_a_penalty_or_bias_is_known(params, changes):
    assert SamplingParams(**params).changes_logits is changes
