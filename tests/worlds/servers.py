"""A server around a tiny engine, in a thread of this process on a port of its own."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from openai import OpenAI

from minivllm.lora.request import LoRARequest
from minivllm.server.app import build_app
from minivllm.server.run import ServerThread
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM
from minivllm.sources.resolver import stable_id
from tests.worlds.adapters import AdapterFolders
from tests.worlds.engines import TinyWorld
from tests.worlds.models import character_tokenizer
from tests.worlds.waiting import PATIENCE

BASE_NAME = "tiny"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}assistant:"


GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


def tokenizer_with_template() -> object:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def served(folders: AdapterFolders, *names: str) -> tuple[LoRARequest, ...]:
    """Adapters under their names, as `ServerSettings` takes them."""
    return tuple(LoRARequest(name, stable_id(name), str(folders.path(name))) for name in names)


@contextmanager
def serving(
    world: TinyWorld,
    *names: str,
    max_queued: int | None = None,
    engine: dict | None = None,
    in_a_process: bool = False,
    has_text: bool = True,
    **settings: object,
) -> Iterator[ServerThread]:
    """A server of these adapters; `engine` are the engine's options. Without text it knows token ids alone."""
    made = ServerSettings(BASE_NAME, adapters=served(world, *names), **settings)
    tokenizer, options = tokenizer_with_template() if has_text else None, engine or {}
    if in_a_process:
        llm = AsyncLLM(world.engine_process(tokenizer, **options), max_queued=max_queued)
    else:
        llm = AsyncLLM.from_engine(world.engine(tokenizer, **options), max_queued=max_queued)
    try:
        with ServerThread(build_app(llm, made), made) as server:
            yield server
    finally:
        llm.shutdown()


@contextmanager
def held_up(server: ServerThread, after_steps: int = 0) -> Iterator[Callable[[], None]]:
    """Inside, the engine takes so many steps; then it does nothing until the block ends, or calls what it is given.

    The outputs of the last of these steps do not come before that.
    """
    client = server.server.state.llm._client
    has_begun, is_over = threading.Event(), threading.Event()
    left = itertools.count(after_steps - 1, -1)

    def wait(_: object) -> None:
        has_begun.set()
        is_over.wait(PATIENCE)

    def step(scheduled: object) -> None:
        if next(left) <= 0:
            wait(scheduled)

    if after_steps:
        client.engine.listeners.append(step)
    else:
        client.call(wait)
        assert has_begun.wait(PATIENCE)
    try:
        yield is_over.set
    finally:
        is_over.set()
        if after_steps:
            client.call(lambda engine: engine.listeners.remove(step))


def client_of(server: ServerThread, key: str = "none", **options: object) -> OpenAI:
    """The openai client as anybody would make it."""
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **options)


class Answers:
    """What transformers and PEFT answer in the world of a server."""

    def __init__(self, world: TinyWorld) -> None:
        self.world, self.tokenizer = world, tokenizer_with_template()

    def text(self, name: str | None, prompt: str, max_tokens: int = 8) -> str:
        """The likeliest text after the prompt; name: an adapter, None or the base's name = base"""
        return self.tokenizer.decode(self.tokens(name, prompt, max_tokens), skip_special_tokens=True)

    def tokens(self, name: str | None, prompt: str, max_tokens: int = 8) -> list[int]:
        ids = self.tokenizer(prompt)["input_ids"]
        return self.world.oracle().greedy(None if name == BASE_NAME else name, ids, max_tokens)

    def chat(self, name: str | None, messages: list[dict], max_tokens: int = 8) -> str:
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return self.text(name, prompt, max_tokens)


def order(http: httpx.Client, what: str, name: str, path: object = None, **more: object) -> httpx.Response:
    """The answer to an order: `what` is load, unload, pin or unpin."""
    body = {"lora_name": name, **({} if path is None else {"lora_path": str(path)}), **more}
    return http.post(f"/v1/{what}_lora_adapter", json=body)


def text_of(client: OpenAI, model: str, prompt: str = "a tale", **more: object) -> str:
    """What a model answers, greedily."""
    return client.completions.create(model=model, prompt=prompt, **{**GREEDY, **more}).choices[0].text
