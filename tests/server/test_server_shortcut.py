"""The way past FastAPI: right requests take it, all others do not, and nobody can tell which way an answer came."""

import asyncio
import json
import re

import httpx
import pytest
from patience import PATIENCE
from starlette.middleware.exceptions import ExceptionMiddleware
from tiny_engine import tiny_world
from tiny_server import serving

from minivllm.server.errors import ApiError, Json
from minivllm.server.protocol import AdapterRequest
from minivllm.server.shortcut import Shortcut

RIGHT = b'{"lora_name": "qv"}'
DECLARED = [(b"content-type", b"application/json")]


class World:
    """Notes which way each request goes. error: what the handler raises"""

    def __init__(self, error=None):
        self.error, self.handled, self.passed, self.sent = error, [], [], []
        self.shortcut = Shortcut(self.fastapi, "the server", {"/hot": (AdapterRequest, self.handler)})

    async def handler(self, body, call):
        if self.error is not None:
            raise self.error
        self.handled.append((body.lora_name, call.holder, (await call.receive())["type"]))
        return Json({"said": "yes"})

    async def fastapi(self, scope, receive, send):
        self.passed.append([await receive(), await receive()])

    def ask(self, content=RIGHT, path="/hot", method="POST", headers=DECLARED):
        body = {"type": "http.request", "body": content, "more_body": False}
        messages = iter([body, {"type": "http.disconnect"}])
        state = {"holder": "somebody", "record": None}
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "state": state}

        async def receive():
            return next(messages)

        async def send(message):
            self.sent.append(message)

        asyncio.run(self.shortcut(scope, receive, send))
        return body


def test_a_request_that_is_right_goes_to_its_handler():
    world = World()

    world.ask()

    assert world.handled == [("qv", "somebody", "http.disconnect")]
    assert world.passed == []
    assert [message.get("body") for message in world.sent] == [None, b'{"said":"yes"}']


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/cold"},
        {"method": "GET"},
        {"headers": []},
        {"headers": [(b"content-type", b"text/plain")]},
        {"headers": [*DECLARED, *DECLARED]},
        {"content": b""},
        {"content": b"{"},
        {"content": b"\xff"},
        {"content": b"[" * 100_000},
        {"content": b'["lora_name"]'},
        {"content": b'{"lora_name": ""}'},
        {"content": b'{"lora_name": "qv", "other": 1}'},
    ],
    ids=lambda change: str(change)[:50],
)
def test_whatever_else_comes_goes_to_fastapi_as_it_came(change):
    world = World()

    body = world.ask(**change)

    assert world.handled == []
    assert world.passed == [[body, {"type": "http.disconnect"}]]


def test_an_error_that_says_something_to_whoever_asked_is_answered():
    world = World(ApiError(404, "there is none", "model"))

    world.ask()

    assert world.sent[0]["status"] == 404
    told = {"message": "there is none", "type": "NotFoundError", "param": "model", "code": 404}
    assert json.loads(world.sent[1]["body"]) == {"error": told}


def test_an_error_of_the_servers_own_is_not_told():
    world = World(KeyError("a secret"))

    with pytest.raises(KeyError):
        world.ask()

    assert world.sent == []


# ---- the same answers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(
        tiny_world(tmp_path_factory), "qv", max_prompts=3, engine={"enable_prefix_caching": False}
    ) as server:
        yield server


ASK = {"model": "qv", "max_tokens": 3, "temperature": 0}
PROMPT = {**ASK, "prompt": "abc"}
CHAT = {**ASK, "messages": [{"role": "user", "content": "abc"}]}
BODIES = [
    json.dumps(body).encode()
    for body in (
        PROMPT,
        {**PROMPT, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}},
        {**PROMPT, "prompt": [5, 6, 7], "return_token_ids": True},
        {**PROMPT, "prompt": [5.0, True, "7"]},
        {**PROMPT, "temperature": "0", "max_tokens": "2", "echo": "true"},
        {**PROMPT, "logit_bias": {"7": 1}, "seed": None},
        {**PROMPT, "temperature": float("nan")},
        {**PROMPT, "max_tokens": 10**400},
        {**PROMPT, "max_tokens": 0},
        {**PROMPT, "model": "nobody"},
        {**PROMPT, "prompt": []},
        {**PROMPT, "prompt": ["a", "b", "c", "d"]},
        {**PROMPT, "prompt": "\ud800"},
        {**PROMPT, "other": 1},
        {**PROMPT, "model": None},
        CHAT,
        {**CHAT, "max_tokens": 1, "stream": True},
        {**CHAT, "messages": []},
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {**CHAT, "top_logprobs": 2},
        [PROMPT],
        "abc",
        None,
    )
] + [
    b"",
    b"{",
    b"\xff\xfe",
    b'{"model": "qv", "model": "tiny", "prompt": "a", "prompt": "b", "max_tokens": 2, "temperature": 0}',
    json.dumps(PROMPT).encode("utf-16"),
    b"[" * 100_000,
]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("content", BODIES, ids=lambda content: repr(content[:70]))
def test_both_ways_give_the_same_answer(server, route, content):
    ways = "application/json", "application/json; charset=utf-8"

    short, long = (answer(server, route, content, way) for way in ways)

    assert short == long


@pytest.mark.parametrize(("route", "body"), [("completions", PROMPT), ("chat/completions", CHAT)])
def test_the_server_has_fastapi_answer_only_what_is_wrong(server, monkeypatch, route, body):
    asked = []

    async def note(middleware, scope, receive, send):
        asked.append(scope["path"])
        await middleware.app(scope, receive, send)

    monkeypatch.setattr(ExceptionMiddleware, "__call__", note)
    url = f"{server.url}/v1/{route}"
    answers = [
        httpx.post(url, json=sent, timeout=PATIENCE).status_code for sent in (body, {**body, "other": 1})
    ]

    assert answers[0] == 200
    assert asked == [f"/v1/{route}"]


def answer(server, route, content, content_type):
    """Status, headers and text, without what is another one for every request."""
    headers = {"content-type": content_type}
    found = httpx.post(f"{server.url}/v1/{route}", content=content, headers=headers, timeout=PATIENCE)
    events = found.text.split("\n\n")
    told = [without_id(event.removeprefix("data: ")) for event in events if event]
    kept = {k: v for k, v in found.headers.items() if k not in ("date", "content-length")}
    return found.status_code, kept, told


def without_id(text):
    if text == "[DONE]":
        return text
    told = json.loads(re.sub(r"cmpl-\w+", "cmpl-ID", text))
    return {name: value for name, value in told.items() if name not in ("id", "created")}
