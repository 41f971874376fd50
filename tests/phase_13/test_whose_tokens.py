"""Which version sampled which token, after restarts at random moments: a list that is kept token by token."""

import random
from dataclasses import fields

import pytest

from minivllm import LoRARequest
from minivllm.versions.weights import LoRAVersion, restarted, token_versions

pytestmark = pytest.mark.lab("13.3")


def version_of(number):
    """The request of a version: all versions of an adapter have its name, and an id and weights of their own."""
    return LoRARequest(
        "policy",
        1000 + number,
        base_model_name="base",
        version=number,
        lora_tensors={"number": number},
        peft_config={},
    )


def test_after_any_restarts_each_token_is_whose_it_was_when_it_was_sampled():
    rng = random.Random(13)
    for _ in range(200):
        request, sampled = version_of(0), []
        for number in range(1, rng.randint(1, 6)):
            sampled += [request.version] * rng.choice((0, 0, 1, 2, 5))
            request = restarted(request, len(sampled), version_of(number))
            assert token_versions(request, len(sampled)) == sampled
            assert request.lora_int_id == 1000 + number, "it is another version's"
        sampled += [request.version] * rng.randint(0, 3)

        assert token_versions(request, len(sampled)) == sampled


def test_on_paper():
    """Version 0 samples four tokens, 1 none, 2 three, and 3 is there now."""
    first = restarted(version_of(0), 4, version_of(1))
    second = restarted(first, 4, version_of(2))
    third = restarted(second, 7, version_of(3))

    assert third.version == 3
    assert third.before == ((0, 4), (2, 3)), "version 1 sampled nothing"
    assert token_versions(third, 7) == [0, 0, 0, 0, 2, 2, 2]
    assert token_versions(third, 9) == [0, 0, 0, 0, 2, 2, 2, 3, 3]


def test_where_no_other_version_sampled_anything_it_is_a_plain_request_of_the_newest_one():
    newest = version_of(2)

    assert restarted(version_of(1), 0, newest) is newest
    assert restarted(restarted(version_of(0), 0, version_of(1)), 0, newest) is newest
    assert token_versions(newest, 3) == [2, 2, 2]


def test_all_but_the_history_is_the_newest_versions():
    newest = version_of(5)

    request = restarted(version_of(4), 3, newest)

    assert isinstance(request, LoRAVersion)
    for each in fields(LoRARequest):
        own, right = getattr(request, each.name), getattr(newest, each.name)
        assert own == right, f"{each.name} is not the newest version's"
    assert request.lora_tensors is newest.lora_tensors, "tensors are large: no copies of them"


def test_who_has_a_request_before_keeps_it_as_it_was():
    before = restarted(version_of(0), 2, version_of(1))

    restarted(before, 5, version_of(2))

    assert before.before == ((0, 2),) and before.version == 1


def test_of_no_token_nobody_is():
    assert token_versions(version_of(3), 0) == []
