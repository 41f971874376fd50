"""The command's options, and the demo model with its four adapters behind the openai client."""

import pytest
from openai import OpenAI

from minivllm.commands.serve import adapters_of, api_keys, pair, vllm_variables
from minivllm.engine_args import EngineArgs
from minivllm.server.app import build_app
from minivllm.server.run import ServerThread, bind
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM

QUESTION = [{"role": "user", "content": "How many employees live in Oslo?"}]


@pytest.mark.parametrize("text", ["x", "=x", "x=", ""])
def test_a_pair_needs_a_name_and_a_value(text):
    with pytest.raises(ValueError, match=f"--lora-modules '{text}' is not of the form NAME=PATH"):
        pair("--lora-modules", text, "NAME=PATH")


def test_a_key_of_the_command_line_counts_before_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("MINIVLLM_API_KEY", "from the environment")

    assert api_keys(None) == ["from the environment"]
    assert api_keys(["given", "another"]) == ["given", "another"]


def test_variables_of_vllms_server_are_said_to_change_nothing_unless_what_stands_for_them_is_given(
    monkeypatch,
):
    given = {"allow_runtime_lora": True, "lora_root": None, "api_key": None}
    monkeypatch.delenv("MINIVLLM_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    monkeypatch.setenv("VLLM_API_KEY", "key")

    [sentence] = vllm_variables(given)

    assert sentence == "VLLM_API_KEY is not read here; give --api-key KEY or MINIVLLM_API_KEY"
    monkeypatch.setenv("MINIVLLM_API_KEY", "key")
    assert list(vllm_variables(given)) == []
    [sentence] = vllm_variables(given | {"allow_runtime_lora": False})
    assert "--allow-runtime-lora --lora-root FOLDER" in sentence


def test_a_port_that_is_taken_is_said():
    with (
        bind("127.0.0.1", 0, 1) as taken,
        pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{taken.getsockname()[1]}.*--port"),
    ):
        bind("127.0.0.1", taken.getsockname()[1], 1)


def test_a_host_that_is_not_this_machine_is_said():
    nobody = "203.0.113.1"  # of the addresses for documentation

    with pytest.raises(OSError, match=rf"cannot listen on {nobody}:0: .*pass another --host"):
        bind(nobody, 0, 1)


def test_an_empty_host_does_not_open_the_server_to_everybody():
    with pytest.raises(ValueError, match="--host must not be empty"):
        bind("", 0, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_name": "m", "adapters": adapters_of(["m=x"], None)}, "two models are called 'm'"),
        ({"model_name": "m", "adapters": adapters_of(["a=x", "a=y"], None)}, "two models are called 'a'"),
        ({"model_name": "m", "adapters": adapters_of(["a\n=x"], None)}, r"'a\\n' has characters"),
        ({"model_name": "m\x7f"}, r"'m\\x7f' has characters"),
        ({"model_name": "m", "allow_runtime_lora": True}, "--lora-root"),
        ({"model_name": "m", "max_concurrency": 0}, "max_concurrency must be at least 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ServerSettings(**settings)


@pytest.mark.nightly
def test_the_demo_model_answers_the_openai_client_as_it_answers_llm():
    from minivllm import LLM, SamplingParams
    from minivllm.models.demo_model import demo_model_path

    adapters = tuple(adapters_of(["demo"], None))
    options = {"model": str(demo_model_path()), "enable_lora": True, "max_lora_rank": 32, "threads": 2}
    names = ["SmolLM2-135M-Instruct", *(adapter.lora_name for adapter in adapters)]
    outputs = LLM(**options).chat(
        [QUESTION] * 5, SamplingParams(temperature=0, max_tokens=24), lora_request=[None, *adapters]
    )
    expected = [output.outputs[0].text for output in outputs]

    llm = AsyncLLM.from_engine_args(EngineArgs(**options))
    settings = ServerSettings(names[0], adapters=adapters)
    with ServerThread(build_app(llm, settings), settings) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chats = [
            client.chat.completions.create(model=name, messages=QUESTION, temperature=0, max_tokens=24)
            for name in names
        ]
    llm.shutdown()

    assert names[1:] == ["bullets", "dates", "json", "sql"]
    assert [chat.choices[0].message.content for chat in chats] == expected
    assert expected[-1].startswith("SELECT COUNT(")
