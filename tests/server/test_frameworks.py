"""Stock frameworks from PyPI chat with an adapter, offline. `make nightly` installs them; nothing else needs them."""

import importlib.util
import socket

import pytest

from tests.worlds.servers import Answers, serving

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (importlib.util.find_spec("langchain_openai") and importlib.util.find_spec("litellm")),
        reason="no frameworks: pip install -c constraints.txt -e '.[frameworks]'",
    ),
]

TALK = [
    {"role": "user", "content": "a fox"},
    {"role": "assistant", "content": "ran"},
    {"role": "user", "content": "b"},
]


@pytest.fixture(scope="module")
def url(world):
    with serving(world, "qv", "all") as server:
        yield f"{server.url}/v1"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """Hosts beside this machine that anything asks for; none is found."""
    asked, find = [], socket.getaddrinfo

    def getaddrinfo(host, *args, **options):
        if host not in ("127.0.0.1", "localhost", b"127.0.0.1"):
            asked.append(host)
            raise socket.gaierror(-2, "Name or service not known")
        return find(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    yield asked
    assert asked == []


@pytest.mark.parametrize("model", ["qv", "all", "tiny"])
class TestLangChain:
    @pytest.fixture
    def chat(self, url, model):
        from langchain_openai import ChatOpenAI

        extra = {"ignore_eos": True}
        options = {
            "temperature": 0,
            "max_tokens": 8,
            "max_retries": 0,
            "stream_usage": True,
            "extra_body": extra,
        }
        return ChatOpenAI(model=model, base_url=url, api_key="none", **options)

    def test_chats_and_streams(self, world, chat, model):
        answer, parts = chat.invoke(TALK), list(chat.stream(TALK))

        expected = Answers(world).chat(model, TALK)
        assert answer.content == "".join(part.content for part in parts) == expected
        assert answer.usage_metadata["output_tokens"] == 8

    def test_is_told_that_no_tool_is_called(self, chat, model):
        import openai

        def weather(city: str) -> str:
            """The weather in a city."""
            return city

        with pytest.raises(openai.BadRequestError, match="no model here calls tools"):
            chat.bind_tools([weather]).invoke(TALK)


@pytest.mark.parametrize("model", ["qv", "all", "tiny"])
class TestLiteLLM:
    def options(self, url, model):
        extra = {"ignore_eos": True}
        asked = {"temperature": 0, "max_tokens": 8, "num_retries": 0, "extra_body": extra, "user": "somebody"}
        return {"model": f"openai/{model}", "api_base": url, "api_key": "none", **asked}

    def test_chats_and_streams(self, world, url, model):
        import litellm

        answer = litellm.completion(messages=TALK, **self.options(url, model))
        parts = list(litellm.completion(messages=TALK, stream=True, **self.options(url, model)))

        expected = Answers(world).chat(model, TALK)
        assert answer.choices[0].message.content == expected
        assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
        assert answer.usage.completion_tokens == 8

    def test_is_told_that_there_are_no_embeddings(self, url, model):
        import litellm

        with pytest.raises(litellm.NotFoundError, match="Embeddings are not served here"):
            litellm.embedding(
                model=f"openai/{model}", input=["a"], api_base=url, api_key="none", max_retries=0
            )
