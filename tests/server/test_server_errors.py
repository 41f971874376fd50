"""What a server refuses, how it says so, and that it serves on."""

import asyncio
import itertools
import json
import threading

import httpx
import pytest

from minivllm.server.errors import encode
from tests.worlds.engines import tiny_world
from tests.worlds.servers import BASE_NAME, serving
from tests.worlds.waiting import PATIENCE

COMPLETION = {"model": "qv", "prompt": "fine", "max_tokens": 2, "temperature": 0}
JSON = {"content-type": "application/json"}
CHAT = {"model": "qv", "messages": [{"role": "user", "content": "fine"}], "max_tokens": 2}

IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.example/y.png"}}]}
# What clients and frameworks send for nothing.
WITHOUT_EFFECT = {
    "user": "somebody",
    "metadata": {"trace": "1"},
    "store": False,
    "service_tier": "auto",
    "prompt_cache_key": "key",
    "safety_identifier": "somebody",
    "priority": 0,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
}
IN_CHATS = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "modalities": ["text"],
    "chat_template_kwargs": {"enable_thinking": False},
    "echo": False,
    "continue_final_message": False,
    "add_special_tokens": False,
    "include_reasoning": True,
}

# Route, what is changed in a good body, status, field that is to blame, words of the sentence. Of what the engine
# refuses there is one row for each layer; its own tests have the others (tests/test_sampling_params.py).
ROWS = [
    ("completions", {"model": "nobody"}, 404, "model", "`nobody` does not exist; there are: tiny, all, qv"),
    ("completions", {"model": "\ud800"}, 400, None, "no JSON: unexpected end of hex escape"),
    ("completions", {"model": "../qv"}, 404, "model", "does not exist"),
    ("completions", {"model": 7}, 400, "model", "model: "),
    ("completions", {"model": None}, 400, "model", "Field required"),
    ("completions", {"prompt": ""}, 400, None, "empty prompt"),
    ("completions", {"prompt": []}, 400, "prompt", "one to 64 prompts"),
    ("completions", {"prompt": ["x"] * 65}, 400, "prompt", "got 65"),
    ("completions", {"prompt": [97]}, 400, None, "from 0 to 96"),
    ("completions", {"prompt": [-1]}, 400, "prompt", "prompt: must be a text, token ids from 0 on, or"),
    ("completions", {"stop": 7}, 400, "stop", "stop: must be a text or a list of texts"),
    ("completions", {"prompt": "x" * 100_000}, 400, None, "characters"),
    ("completions", {"prompt": "half \ud800"}, 400, None, "no JSON: unexpected end of hex escape"),
    ("completions", {"prompt": {"text": "x"}}, 400, "prompt", ""),
    ("completions", {"max_tokens": 0}, 400, None, "max_tokens"),
    ("completions", {"temperature": "hot"}, 400, "temperature", "temperature: "),
    ("completions", {"n": 2}, 400, None, "n must be 1 where the likeliest"),
    ("completions", {"logit_bias": {"x": 1}}, 400, "logit_bias.x.[key]", ""),
    ("completions", {"logprobs": 10**6}, 400, None, "logprobs"),
    ("completions", {"best_of": 2}, 400, "best_of", ""),
    ("completions", {"suffix": "x"}, 400, "suffix", ""),
    ("completions", {"frobnicate": 1}, 400, "frobnicate", "'frobnicate' is not supported"),
    ("completions", {"echo": True, "logprobs": 1}, 400, None, "echo with logprobs"),
    ("completions", {"stream_options": {}}, 400, None, "only with stream"),
    ("completions", {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x", "not supported"),
    ("chat/completions", {"messages": []}, 400, "messages", ""),
    ("chat/completions", {"messages": "hello"}, 400, "messages", ""),
    ("chat/completions", {"messages": [{"role": "user"}], "tools": [{}]}, 400, "tools", "calls tools"),
    ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice", "calls tools"),
    ("completions", {"tools": []}, 400, "tools", "calls tools"),
    ("completions", {"store": True}, 400, "store", "keeps no answers"),
    ("completions", {"service_tier": "flex"}, 400, "service_tier", "one tier"),
    ("completions", {"length_penalty": 2}, 400, "length_penalty", "temperature 0"),
    ("completions", {"guided_choice": ["a"]}, 400, "guided_choice", "give structured_outputs"),
    ("chat/completions", {"continue_final_message": True}, 400, "continue_final_message", "should be False"),
    ("completions", {"priority": -1}, 400, "priority", "--scheduling-policy"),
    ("chat/completions", {"modalities": ["audio"]}, 400, "modalities", "text alone"),
    ("chat/completions", {"messages": [IMAGE]}, 400, "messages.0.content", "a list of {"),
    ("chat/completions", {"chat_template": "x"}, 400, "chat_template", "--chat-template at its start"),
    (
        "chat/completions",
        {"chat_template_kwargs": {"tokenize": 1}},
        400,
        None,
        "cannot take this conversation",
    ),
    ("chat/completions", {"response_format": {"type": "xml"}}, 400, "response_format.type", ""),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema"}},
        400,
        "response_format",
        "need each other",
    ),
    ("completions", {"response_format": {"type": "text", "x": 1}}, 400, "response_format.x", "not supported"),
    ("completions", {"structured_outputs": {"regex": "("}}, 400, None, "unclosed group"),
    (
        "completions",
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        *(400, None, "leave one of them out"),
    ),
    ("chat/completions", {"top_logprobs": 2}, 400, None, "logprobs: true"),
    ("chat/completions", {"messages": [{"role": "", "content": ""}]}, 400, "messages.0.role", ""),
    ("chat/completions", {"model": "nobody"}, 404, "model", "does not exist"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tiny_world(tmp_path_factory), "qv", "all", engine={"max_logprobs": 5}) as server:
        yield server


@pytest.fixture(scope="module")
def ids_alone(tmp_path_factory):
    with serving(tiny_world(tmp_path_factory), "qv", has_text=False) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def assert_is_an_error(response, status):
    """In OpenAI's form, with vLLM's fields."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert 0 < len(error["message"]) <= 500
    return error


def assert_serves(client):
    response = client.post("/v1/completions", json=COMPLETION)

    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("route", "change", "status", "param", "words"), ROWS, ids=lambda value: str(value)[:40]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_request_is_refused_in_a_sentence(client, route, change, status, param, words, stream):
    body = {**(CHAT if route.startswith("chat") else COMPLETION), **change}
    if stream:
        body = {"stream": True, **body}
    if stream and change == {"stream_options": {}}:
        pytest.skip("that is fine in a stream")

    response = client.post(f"/v1/{route}", content=json.dumps(body), headers=JSON)

    error = assert_is_an_error(response, status)
    assert words in error["message"]
    assert (error["param"] or "").startswith(param or "")
    assert bool(param) == bool(error["param"])


def test_text_that_no_encoding_has_stays_escaped():
    """Whatever an answer quotes, half a character too, the answer itself must be sent."""
    content = {"quoted": "half \ud800", "whole": "é😀"}

    assert json.loads(encode(content)) == content
    assert "é😀".encode() in encode(content)


def test_routes_that_are_not_there_and_other_methods_are_errors_in_the_same_form(client):
    base_url_without_v1 = client.post("/chat/completions", json=CHAT)
    unknown = client.get("/v1/wizardry")
    other_method = client.get("/v1/completions")
    assert_is_an_error(other_method, 405)
    assert "but /v1/chat/completions" in assert_is_an_error(base_url_without_v1, 404)["message"]
    assert "/openapi.json lists" in assert_is_an_error(unknown, 404)["message"]
    assert other_method.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path",
    [
        *("embeddings", "responses", "responses/resp_1", "moderations", "images/generations", "audio/speech"),
        *("../pooling", "../score", "rerank", "messages", "batches", "files"),
    ],
)
def test_what_is_no_part_of_this_server_is_refused_and_not_answered_by_the_base_model(client, path):
    """NVIDIA Dynamo #14111: a pooling request with an adapter was answered by the base model, with 200."""
    answer = client.post(
        httpx.URL(f"{client.base_url}/v1/").join(path), json={"model": "qv", "input": "fine"}
    )

    assert "not served here: this server generates text" in assert_is_an_error(answer, 404)["message"]


@pytest.mark.parametrize(
    ("route", "fields"), [("completions", WITHOUT_EFFECT), ("chat/completions", WITHOUT_EFFECT | IN_CHATS)]
)
def test_fields_that_mean_nothing_here_change_nothing(client, route, fields):
    body = {**(CHAT if route.startswith("chat") else COMPLETION), "temperature": 0}

    plain, other = (client.post(f"/v1/{route}", json=each) for each in (body, {**body, **fields}))

    assert other.status_code == 200, other.text
    assert other.json()["choices"] == plain.json()["choices"]
    assert other.json()["usage"]["completion_tokens"] == 2


def test_an_answer_may_be_sent_back_as_it_came(client):
    """As the openai client does it: fields that are null or empty go along."""
    answer = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "tool_calls": []}

    again = client.post("/v1/chat/completions", json={**CHAT, "messages": [*CHAT["messages"], answer]})

    assert again.status_code == 200, again.text


def test_a_prompt_that_is_refused_while_another_streams_is_an_event_of_the_stream(
    server, client, monkeypatch
):
    llm, read, let_go = server.server.state.llm, itertools.count(), threading.Event()
    tokenizing = llm.run_in_tokenizer_thread

    async def the_second_waits(function):
        if next(read):
            await asyncio.to_thread(let_go.wait, PATIENCE)
        return await tokenizing(function)

    monkeypatch.setattr(llm, "run_in_tokenizer_thread", the_second_waits)
    body = {**COMPLETION, "prompt": ["fine", "x" * 300], "ignore_eos": True, "stream": True}

    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = filter(None, response.iter_lines())
        first = next(lines)
        let_go.set()
        events = [first, *lines]

    assert '"index":0' in first
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error["code"] == 400 and "has a prompt of 300 tokens" in error["message"]


@pytest.mark.parametrize(
    ("route", "change"),
    [
        ("/v1/completions", {"prompt": [1, 2], "echo": True}),
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/chat/completions", {"prompt": None, "messages": CHAT["messages"]}),
        ("/tokenize", {"max_tokens": None, "temperature": None}),
    ],
    ids=["echo", "text", "chat", "tokenize"],
)
def test_a_server_of_token_ids_alone_says_so_where_a_request_needs_text(ids_alone, route, change):
    refused = httpx.post(f"{ids_alone.url}{route}", json={**COMPLETION, **change}, timeout=PATIENCE)
    served = httpx.post(
        f"{ids_alone.url}/v1/completions", json={**COMPLETION, "prompt": [5, 6]}, timeout=PATIENCE
    )

    assert "tokenizer" in assert_is_an_error(refused, 400)["message"]
    assert served.json()["usage"]["completion_tokens"] == 2


def test_fields_that_are_null_count_as_left_out(client):
    nulls = dict.fromkeys(
        ("stop", "seed", "logit_bias", "user", "tools", "response_format", "stream_options")
    )

    response = client.post(
        "/v1/completions", json={**COMPLETION, **nulls, "response_format": {"type": "text"}}
    )

    assert response.status_code == 200, response.text


def test_no_page_of_another_origin_may_read_an_answer(client):
    response = client.post(
        "/v1/completions", json=COMPLETION, headers={"origin": "https://elsewhere.example"}
    )

    assert not [name for name in response.headers if name.startswith("access-control")]


def test_tokens_come_and_go_as_text(client):
    tokens = client.post("/tokenize", json={"model": "qv", "prompt": "abc", "return_token_strs": True}).json()
    chat = client.post("/tokenize", json={"model": BASE_NAME, "messages": CHAT["messages"]}).json()
    text = client.post("/detokenize", json={"model": "qv", "tokens": tokens["tokens"]}).json()

    assert (tokens["count"], text, tokens["token_strs"]) == (3, {"prompt": "abc"}, ["a", "b", "c"])
    assert chat["count"] == len("user: fine|assistant:")
    assert_is_an_error(client.post("/detokenize", json={"model": "qv", "tokens": [97]}), 400)
    assert_is_an_error(client.post("/tokenize", json={"model": "qv"}), 400)
    half = client.post("/tokenize", content=json.dumps({"model": "qv", "prompt": "\ud800"}), headers=JSON)
    assert_is_an_error(half, 400)


def test_after_all_that_nothing_is_left_behind(server, client):
    assert_serves(client)

    engine = server.server.state.llm._client.engine
    assert not engine.has_unfinished_requests()
    assert not engine.scheduler.requests
