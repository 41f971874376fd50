"""Where in a prompt an activated adapter begins, by PEFT's own function and on paper."""

import random

import pytest

from minivllm import LoRARequest
from minivllm.alora.invocation import INVOCATION
from minivllm.alora.prompts import NEVER, InvokedPrompts, start_of_last
from minivllm.engine.input_processor import PromptLimits, base_limits

pytestmark = pytest.mark.lab("12.1")

BASE = PromptLimits(100, 64)
ADAPTER = LoRARequest("judge", 3, "/nowhere")


@pytest.fixture(scope="module")
def peft_offsets():
    """PEFT's function: how far before a prompt's end the adapter begins, None = it does not."""
    import torch
    from peft import LoraConfig
    from peft.tuners.lora.variants import calculate_alora_offsets

    def offsets(tokens, prompt):
        config = {"a": LoraConfig(alora_invocation_tokens=tokens, task_type="CAUSAL_LM")}
        return calculate_alora_offsets(config, "a", torch.tensor([prompt]))[0]

    return offsets


def test_it_is_where_peft_finds_the_tokens_last(peft_offsets):
    rng = random.Random(12)
    for _ in range(400):
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 4))]
        prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, 14))]
        offset = peft_offsets(tokens, prompt)
        expected = NEVER if offset is None else len(prompt) - offset

        assert start_of_last(tuple(tokens), prompt) == expected, f"tokens {tokens} in prompt {prompt}"


@pytest.mark.parametrize(
    ("tokens", "prompt", "start"),
    [
        ((5,), [5, 1, 5, 2], 2),  # the last of two
        ((5, 6), [5, 6, 9, 5], 0),  # the end looks like another one, and is not
        ((5, 5), [5, 5, 5], 1),  # they overlap
        ((5, 6, 5), [1, 5, 6, 5, 6, 5], 3),
        ((5, 6), [5, 6], 0),
        ((5, 6), [1, 2, 5, 6], 2),
    ],
)
def test_it_is_the_first_token_of_the_last_occurrence(tokens, prompt, start):
    assert start_of_last(tokens, prompt) == start
    assert start_of_last(list(tokens), tuple(prompt)) == start, (
        "of the tokens as a list and the prompt as a tuple"
    )


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [((5, 6), [6, 5]), ((5,), []), ((5, 6, 7), [5, 6]), ((5, 6), [5, 1, 6]), ((7,), [17])],
)
def test_of_a_prompt_without_the_tokens_the_base_model_computes_all(tokens, prompt):
    start = start_of_last(tokens, prompt)

    assert start == NEVER, f"{start}, but {tokens} are not in {prompt}"


def test_an_adapter_with_tokens_says_where_it_begins_in_each_prompt():
    limits = InvokedPrompts(base_limits)(BASE, ADAPTER, {INVOCATION: (5, 6)})

    assert limits.adapter_start is not None, "nobody says where the adapter begins"
    assert [limits.adapter_start(prompt) for prompt in ([5, 6, 5, 6, 1], [1, 5, 6], [6, 5])] == [2, 1, NEVER]


def test_two_adapters_do_not_share_their_tokens():
    limits_of = InvokedPrompts(base_limits)

    first, second = (limits_of(BASE, ADAPTER, {INVOCATION: tokens}) for tokens in ((5,), (6,)))

    assert (first.adapter_start([5, 6, 7]), second.adapter_start([5, 6, 7])) == (0, 1)


@pytest.mark.parametrize("found", [{}, {"something else": (5, 6)}])
def test_an_adapter_without_tokens_begins_with_its_prompt(found):
    assert InvokedPrompts(base_limits)(BASE, ADAPTER, found).adapter_start is None


def test_what_other_options_let_prompts_be_stays():
    """One that adds tokens, say: its vocabulary is larger, and it has a tokenizer of its own."""
    asked = []

    def limits_of(base, lora_request, found):
        asked.append((base, lora_request, dict(found)))
        return PromptLimits(107, 4096, "its own")

    found = {INVOCATION: (5,), "another option's": 1}
    limits = InvokedPrompts(limits_of)(BASE, ADAPTER, found)

    assert asked == [(BASE, ADAPTER, found)]
    assert limits[:3] == (107, 4096, "its own")
    assert limits.adapter_start([1, 5]) == 1
    assert InvokedPrompts(limits_of)(BASE, ADAPTER, {}) == PromptLimits(107, 4096, "its own")
