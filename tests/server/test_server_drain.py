"""The end of a server: requests that run are finished, new ones are told to go elsewhere."""

import json
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from patience import PATIENCE, wait_until
from tiny_engine import tiny_world
from tiny_server import Answers, client_of, held_up, serving

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def drain(server):
    """What a SIGTERM does."""
    server.server.drain()


def test_a_stream_that_runs_is_finished_and_a_new_one_is_refused(world):
    asked = {"model": "qv", "prompt": "last", "max_tokens": 100, "stream": True, **GREEDY}
    with serving(world, "qv", drain_seconds=PATIENCE) as server, client_of(server) as client:
        with held_up(server, after_steps=4):
            stream = client.completions.create(**asked)
            text = next(iter(stream)).choices[0].text
            drain(server)
            refused = httpx.post(
                f"{server.url}/v1/completions", json={"model": "qv", "prompt": "x"}, timeout=PATIENCE
            )
            health = httpx.get(f"{server.url}/health", timeout=PATIENCE)
        text += "".join(chunk.choices[0].text for chunk in stream)
        server._thread.join(PATIENCE)

        assert not server._thread.is_alive()
    assert text == Answers(world).text("qv", "last", 100)
    assert (refused.status_code, health.status_code) == (503, 503)
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"


def test_who_takes_longer_than_allowed_is_cut_off_with_an_error(world):
    body = {"model": "qv", "prompt": "long", "max_tokens": 120, "n": 8, "ignore_eos": True, "stream": True}
    with serving(world, "qv", drain_seconds=0.05) as server:
        with (
            held_up(server, after_steps=4) as let_go,
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            drain(server)
            wait_until(lambda: server.server.state.llm._client._stopping)
            let_go()
            events = [line for line in lines if line]
        server._thread.join(PATIENCE)

        assert not server._thread.is_alive()
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 503


@pytest.mark.parametrize("prompt", ["text", ["one", "two"]], ids=["one prompt", "several"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_still_waits_to_be_tokenized_is_told_that_the_engine_has_ended(world, prompt, stream):
    body = {"model": "qv", "prompt": prompt, "stream": stream}
    chat = {"model": "qv", "messages": [{"role": "user", "content": "text"}], "stream": stream}
    let_go, answers = threading.Event(), []
    with serving(world, "qv", drain_seconds=0.05) as server:
        llm = server.server.state.llm
        waiting = noted_calls(llm._tokenizing)
        llm._tokenizing._executor.submit(let_go.wait, PATIENCE)
        asked = (("completions", body), ("chat/completions", chat))
        threads = [
            threading.Thread(
                target=lambda r=r, b=b: answers.append(
                    httpx.post(f"{server.url}/v1/{r}", json=b, timeout=PATIENCE)
                )
            )
            for r, b in asked
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(waiting) == (2 if prompt == "text" else 3))
        drain(server)
        wait_until(lambda: llm._client.error is not None)
        let_go.set()
        for thread in threads:
            thread.join()

    assert [answer.json()["error"]["code"] for answer in answers] == [503, 503]


def noted_calls(executor):
    """What is run from now on."""
    noted, run = [], executor.run
    executor.run = lambda function: noted.append(function) or run(function)
    return noted


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)], ids=lambda n: n.name
)
def test_a_signal_ends_the_command_when_its_requests_have_ended(world, number):
    command = [
        sys.executable,
        "-m",
        "minivllm.cli",
        "serve",
        str(world.base),
        "--port",
        "0",
        "--dtype",
        "float64",
    ]
    command += ["--lora-modules", f"qv={world.path('qv')}", "--served-model-name", "tiny", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while "Serving" not in (line := process.stderr.readline()):
            assert process.poll() is None, line
        url = line.split()[-1].removesuffix("/v1")
        answers = []

        def ask():
            body = {"model": "qv", "prompt": "bye", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE))

        thread = threading.Thread(target=ask)
        thread.start()
        while (
            'running_lora_adapters="qv"' not in httpx.get(f"{url}/metrics", timeout=PATIENCE).text
            and not answers
        ):
            time.sleep(0.005)
        process.send_signal(number)
        thread.join()

        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    assert answers[0].json()["choices"][0]["text"] == Answers(world).text("qv", "bye", 100)
