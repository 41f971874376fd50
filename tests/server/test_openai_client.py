"""The openai client, unchanged, against a server; transformers and PEFT say what the answers are."""

import asyncio
import json
import math
import re

import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.tools.nights import by_day
from tests.worlds.servers import BASE_NAME, Answers, client_of, serving

NAMES = ("qv", "all", "mlp", "patterns")
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]


@pytest.fixture(scope="module", params=by_day([False, True], 2), ids=["thread", "process"])
def server(world, request):
    with serving(world, *NAMES, in_a_process=request.param) as server:
        yield server


@pytest.fixture(scope="module")
def answers(world):
    return Answers(world)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


@pytest.mark.parametrize("model", [BASE_NAME, *NAMES])
def test_a_completion_is_what_peft_answers(client, answers, model):
    completion = client.completions.create(model=model, prompt="a quick fox", **GREEDY)

    assert completion.choices[0].text == answers.text(model, "a quick fox")
    assert completion.choices[0].finish_reason == "length"
    assert completion.model == model
    assert completion.usage.prompt_tokens == len("a quick fox")
    assert completion.usage.completion_tokens == 8


@pytest.mark.parametrize("model", [BASE_NAME, "all"])
def test_a_chat_goes_through_the_template(client, answers, model):
    completion = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)

    assert completion.choices[0].message.content == answers.chat(model, MESSAGES)
    assert completion.choices[0].message.role == "assistant"


def test_a_message_may_come_in_parts(client, answers):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    completion = client.chat.completions.create(
        model="qv", messages=[{"role": "user", "content": parts}], **GREEDY
    )

    whole = [{"role": "user", "content": "one\ntwo"}]
    assert completion.choices[0].message.content == answers.chat("qv", whole)


def test_a_stream_adds_up_to_the_answer_and_ends_with_its_usage(client, answers):
    stream = client.completions.create(
        model="mlp", prompt="once", stream=True, stream_options={"include_usage": True}, **GREEDY
    )

    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answers.text("mlp", "once")
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 4, 8)


def test_every_event_of_a_stream_may_have_the_usage_so_far(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model="mlp", prompt="once", stream=True, stream_options=options, **GREEDY
    )

    usages = [chunk.usage for chunk in stream]
    counts = [each.completion_tokens for each in usages]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 8
    assert {each.prompt_tokens for each in usages} == {4}


def test_a_streamed_chat_begins_with_the_role(client, answers):
    stream = client.chat.completions.create(model="all", messages=MESSAGES, stream=True, **GREEDY)

    first, *rest = [chunk.choices[0] for chunk in stream]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(choice.delta.content or "" for choice in rest) == answers.chat("all", MESSAGES)


def test_adapters_share_a_batch_of_asynchronous_streams(server, answers):
    async def ask(client, model, prompt):
        stream = await client.completions.create(model=model, prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(asked):
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, *each) for each in asked))

    asked = [(model, f"story {i}") for i, model in enumerate([BASE_NAME, *NAMES] * 3)]
    assert asyncio.run(ask_all(asked)) == [answers.text(*each) for each in asked]


def test_prompts_may_be_several_and_token_ids(client, answers):
    ids = answers.tokenizer("ids")["input_ids"]
    texts = client.completions.create(model="qv", prompt=["first", "second"], **GREEDY)
    tokens = client.completions.create(model="qv", prompt=[ids, ids[::-1]], **GREEDY)

    assert [choice.text for choice in texts.choices] == [answers.text("qv", p) for p in ("first", "second")]
    assert [choice.text for choice in tokens.choices] == [answers.text("qv", p) for p in ("ids", "sdi")]
    assert [choice.index for choice in texts.choices] == [0, 1]


def test_several_prompts_stream_side_by_side(client, answers):
    prompts = ["first", "second one", "third"]
    stream = client.completions.create(model="all", prompt=prompts, stream=True, **GREEDY)

    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [answers.text("all", prompt) for prompt in prompts]


def test_echo_puts_the_prompt_before_the_answer(client, answers):
    whole = client.completions.create(model="qv", prompt="echo", echo=True, **GREEDY)
    stream = client.completions.create(model="qv", prompt="echo", echo=True, stream=True, **GREEDY)

    assert whole.choices[0].text == "echo" + answers.text("qv", "echo")
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_n_answers_with_a_seed_are_drawn_again_alike_and_stream_alike(client):
    asked = {"model": "qv", "prompt": "draw", "n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 6}
    asked["extra_body"] = {"ignore_eos": True}
    first = client.completions.create(**asked)
    again = client.completions.create(**asked)
    streamed = ["", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text

    texts = [choice.text for choice in first.choices]
    assert [choice.text for choice in again.choices] == texts == streamed
    assert len(set(texts)) == 3
    assert first.usage.completion_tokens == 18


def test_a_stop_string_ends_the_answer_before_it(client, answers):
    whole = answers.text("all", "stop here", 12)
    stop = whole[4:6]
    asked = {"model": "all", "prompt": "stop here", "stop": stop, **GREEDY, "max_tokens": 12}

    completion = client.completions.create(**asked)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    assert completion.choices[0].text == streamed == whole[: whole.index(stop)]
    assert completion.choices[0].finish_reason == "stop"


def test_logprobs_are_those_of_the_likeliest_tokens(client, world, answers):
    logprobs = client.completions.create(model="qv", prompt="sure?", logprobs=3, **GREEDY).choices[0].logprobs

    ids = answers.tokenizer("sure?")["input_ids"]
    expected = world.oracle().logits("qv", [ids])[0, -1].log_softmax(-1).topk(3)
    assert logprobs.token_logprobs[0] == pytest.approx(expected.values[0].item())
    assert sorted(logprobs.top_logprobs[0].values(), reverse=True) == pytest.approx(expected.values.tolist())
    texts = [answers.tokenizer.decode([token]) for token in answers.tokens("qv", "sure?")]
    assert logprobs.tokens == texts
    assert logprobs.text_offset == [sum(map(len, texts[:i])) for i in range(8)]


def test_logprobs_of_a_chat_stream_as_they_come_whole(client):
    asked = {"model": "qv", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GREEDY}

    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]

    streamed = [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in whole]
    assert [each.logprob for each in streamed] == pytest.approx([each.logprob for each in whole])
    for each in whole:
        assert len(each.top_logprobs) == 2
        assert each.top_logprobs[0].token == each.token == bytes(each.bytes).decode()


def test_a_bias_and_penalties_reach_the_sampler(client, answers):
    banned = answers.tokens("qv", "bias", 1)[0]
    biased = client.completions.create(
        model="qv", prompt="bias", logit_bias={str(banned): -100}, logprobs=0, **GREEDY
    )
    repeated = answers.text("qv", "aaaa", 40)
    penalized = client.completions.create(
        model="qv", prompt="aaaa", presence_penalty=2, frequency_penalty=2, **{**GREEDY, "max_tokens": 40}
    )

    assert answers.tokenizer.decode([banned]) not in biased.choices[0].logprobs.tokens
    assert len(set(penalized.choices[0].text)) > len(set(repeated))
    assert math.isfinite(biased.choices[0].logprobs.token_logprobs[0])


SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "grade": {"enum": ["good", "bad"]}},
    "required": ["sure", "grade"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", [BASE_NAME, "all"])
def test_an_answer_follows_the_schema_that_is_given_streamed_or_not(client, model):
    asked = {"model": model, "messages": MESSAGES, "temperature": 1, "seed": 3, "max_tokens": 60}
    asked |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}

    whole = client.chat.completions.create(**asked).choices[0]
    stream = client.chat.completions.create(**asked, stream=True)

    answer = json.loads(whole.message.content)
    assert (type(answer["sure"]), answer["grade"] in ("good", "bad"), len(answer)) == (bool, True, 2)
    assert whole.finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.message.content


def test_vllms_own_field_names_other_structures(client):
    asked = {"model": "qv", "prompt": "pick:", "temperature": 0, "max_tokens": 20}

    picked = client.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["cat", "dog"]}})
    matched = client.completions.create(**asked, extra_body={"structured_outputs": {"regex": "[a-c]{5}!"}})

    assert picked.choices[0].text in ("cat", "dog")
    assert re.fullmatch("[a-c]{5}!", matched.choices[0].text)


def test_token_ids_are_in_the_response_if_requested(client, answers):
    asked = {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    ids = answers.tokens("qv", "tokens")

    whole = client.completions.create(model="qv", prompt="tokens", **asked)
    stream = client.completions.create(model="qv", prompt="tokens", stream=True, **asked)

    assert whole.choices[0].token_ids == ids
    assert [token for chunk in stream for token in chunk.choices[0].token_ids] == ids


def test_models_are_the_base_and_each_adapter_with_its_root(client, world):
    cards = {card.id: card for card in client.models.list()}

    assert list(cards) == [BASE_NAME, *sorted(NAMES)]
    assert cards["qv"].parent == BASE_NAME
    assert cards["qv"].root == str(world.path("qv"))
    assert cards[BASE_NAME].root == str(world.base)
    assert client.models.retrieve("qv") == cards["qv"]
    with pytest.raises(NotFoundError, match="there are: tiny, all, mlp"):
        client.models.retrieve("nobody")


def test_a_chat_answers_until_the_context_is_full_without_a_limit(server, client):
    asked = {"model": "qv", "messages": MESSAGES, "temperature": 0, "extra_body": {"ignore_eos": True}}

    usage = client.chat.completions.create(**asked).usage
    short = client.chat.completions.create(**asked, max_completion_tokens=3).usage

    longest = server.server.state.llm.config.model_config.max_model_len
    assert usage.total_tokens == longest
    assert short.completion_tokens == 3
