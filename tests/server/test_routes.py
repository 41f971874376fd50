"""What a route does with a body, and with what its handler raises."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from minivllm.server.errors import ApiError
from minivllm.server.protocol import AdapterRequest
from minivllm.server.routes import Endpoint, openapi, post
from minivllm.server.settings import ServerSettings

RIGHT = b'{"lora_name": "qv"}'
JSON = b"application/json"


class World:
    """A route whose handler notes who asked, or raises.   sent: what was answered"""

    def __init__(self, error=None):
        self.error, self.handled, self.sent = error, [], []
        self.endpoint = Endpoint(self.handler, AdapterRequest)

    async def handler(self, body, call):
        if self.error is not None:
            raise self.error
        self.handled.append((body.lora_name, call.holder, (await call.receive())["type"]))
        return {"said": "yes"}

    def ask(self, content=RIGHT, declared=JSON):
        """In two parts; then the sender goes."""
        part = {"type": "http.request", "body": content, "more_body": True}
        messages = iter([part, {"type": "http.request"}, {"type": "http.disconnect"}])
        if content is None:
            messages = iter([{"type": "http.disconnect"}])
        server = SimpleNamespace(settings=ServerSettings("tiny"))
        scope = {
            "type": "http",
            "headers": [(b"content-type", declared)],
            "path_params": {},
            "app": SimpleNamespace(state=SimpleNamespace(server=server)),
            "state": {"holder": "somebody", "record": None},
        }

        async def receive():
            return next(messages)

        async def send(message):
            self.sent.append(message)

        asyncio.run(self.endpoint(scope, receive, send))

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
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_that_is_wrong_is_refused_in_a_sentence(content, declared, words, param):
    world = World()

    world.ask(content, declared)

    status, answer = world.answer
    assert (status, answer["error"]["param"], world.handled) == (400, param, [])
    assert words in answer["error"]["message"]


def test_a_sender_that_goes_before_its_body_is_there_asks_nothing():
    world = World()

    world.ask(content=None)

    assert world.handled == world.sent == []


def test_an_error_that_says_something_to_the_client_is_answered():
    world = World(ApiError(404, "there is none", "model"))

    world.ask()

    told = {"message": "there is none", "type": "NotFoundError", "param": "model", "code": 404}
    assert world.answer == (404, {"error": told})


def test_an_error_of_the_servers_own_is_not_told():
    world = World(KeyError("a secret"))

    with pytest.raises(KeyError):
        world.ask()

    assert world.sent == []


def test_a_description_has_each_route_and_the_fields_of_its_body():
    async def pin(body, call):
        """Keep it."""

    described = openapi([post("/pin", AdapterRequest, pin)])

    asked = described["paths"]["/pin"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = asked["$ref"].removeprefix("#/components/schemas/")
    assert list(described["components"]["schemas"][name]["properties"]) == ["lora_name"]
