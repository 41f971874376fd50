"""What a route does with a body, and with what its handler raises."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette

from minivllm.server.errors import HANDLERS, ApiError
from minivllm.server.protocol import AdapterRequest
from minivllm.server.routes import openapi, post
from minivllm.server.settings import ServerSettings

RIGHT = b'{"lora_name": "qv"}'
JSON = b"application/json"


class World:
    """An application of one route whose handler notes its request, or raises.   sent: the response"""

    def __init__(self, error=None):
        self.error, self.handled, self.sent = error, [], []
        route = post("/pin", AdapterRequest, self.handler)
        self.app = Starlette(routes=[route], exception_handlers=HANDLERS)
        self.app.state.server = SimpleNamespace(settings=ServerSettings("tiny"))

    async def handler(self, body, call):
        if self.error is not None:
            raise self.error
        self.handled.append((body.lora_name, call.holder, (await call.receive())["type"]))
        return {"said": "yes"}

    def ask(self, content=RIGHT, declared=JSON):
        """The body comes in two parts; then the client closes the connection."""
        part = {"type": "http.request", "body": content, "more_body": True}
        messages = iter([part, {"type": "http.request"}, {"type": "http.disconnect"}])
        if content is None:
            messages = iter([{"type": "http.disconnect"}])
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/pin",
            "headers": [(b"content-type", declared)],
            "state": {"holder": "somebody", "record": None},
        }

        async def receive():
            return next(messages)

        async def send(message):
            self.sent.append(message)

        asyncio.run(self.app(scope, receive, send))

    @property
    def answer(self):
        start, body = self.sent
        return start["status"], json.loads(body["body"])


@pytest.mark.parametrize("declared", [JSON, b"application/json; charset=utf-8", b"Application/JSON ;x"])
def test_a_request_that_is_right_goes_to_its_handler(declared):
    world = World()

    world.ask(declared=declared)

    assert world.handled == [("qv", "somebody", "http.disconnect")]
    assert world.answer == (200, {"said": "yes"})


@pytest.mark.parametrize(
    ("content", "declared", "words", "param"),
    [
        (RIGHT, b"", "content-type: application/json", None),
        (RIGHT, b"text/plain", "content-type: application/json", None),
        (b"", JSON, "no JSON", None),
        (b"{", JSON, "no JSON", None),
        (b"\xff", JSON, "no JSON", None),
        (b'{"lora_name": "\\ud800"}', JSON, "no JSON", None),
        (b"[" * 100_000, JSON, "recursion limit", None),
        (b'["lora_name"]', JSON, "the body: ", None),
        (b'{"lora_name": ""}', JSON, "lora_name: ", "lora_name"),
        (b'{"lora_name": "qv", "other": 1}', JSON, "'other' is not supported", "other"),
        (b'{"lora_name": NaN}', JSON, "lora_name: ", "lora_name"),
        (b'{"lora_name": ' + b"9" * 5000 + b"}", JSON, "no JSON", None),
        (b"null", JSON, "the body: ", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_that_is_wrong_is_refused_in_a_sentence(content, declared, words, param):
    world = World()

    world.ask(content, declared)

    status, answer = world.answer
    assert (status, answer["error"]["param"], world.handled) == (400, param, [])
    assert words in answer["error"]["message"]


def test_a_client_that_leaves_before_its_body_is_there_gets_no_handler():
    world = World()

    world.ask(content=None)

    assert world.handled == world.sent == []


def test_an_error_for_the_client_is_its_response():
    world = World(ApiError(404, "there is none", "model"))

    world.ask()

    error = {"message": "there is none", "type": "NotFoundError", "param": "model", "code": 404}
    assert world.answer == (404, {"error": error})


def test_a_bug_of_a_handler_is_logged_and_not_shown():
    world = World(KeyError("a secret"))

    with pytest.raises(KeyError):  # uvicorn logs it
        world.ask()

    status, answer = world.answer
    assert status == 500
    assert "secret" not in json.dumps(answer)


def test_a_description_has_each_route_and_the_fields_of_its_body():
    async def pin(body, call):
        """Keep it."""

    described = openapi([post("/pin", AdapterRequest, pin)])

    asked = described["paths"]["/pin"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = asked["$ref"].removeprefix("#/components/schemas/")
    assert list(described["components"]["schemas"][name]["properties"]) == ["lora_name"]
