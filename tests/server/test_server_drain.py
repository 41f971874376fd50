"""The end of a server: running requests finish, new ones are refused."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from minivllm.errors import EngineDeadError
from minivllm.serving.async_llm import AsyncLLM
from tests.tools.nights import by_day
from tests.worlds.processes import break_steps, process_id, stand_still_after, wait_for
from tests.worlds.servers import Answers, client_of, held_up, serving
from tests.worlds.waiting import PATIENCE, wait_until

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


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


def test_a_request_that_takes_longer_than_the_drain_gets_an_error(world):
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


@pytest.mark.parametrize(
    ("prompt", "stream"), [("text", False), (["one", "two"], True)], ids=["whole", "several, streamed"]
)
def test_a_request_that_waits_for_its_tokenizer_gets_the_engines_end(world, prompt, stream):
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


class Asking:
    """Requests that are sent beside each other. answers: what became of each, by its number"""

    def __init__(self, server):
        self.server, self.answers, self._threads = server, {}, []

    def send(self, **body):
        def ask():
            try:
                self.answers[number] = httpx.post(
                    f"{self.server.url}/v1/completions", json=body, timeout=PATIENCE
                )
            except httpx.HTTPError as error:
                self.answers[number] = error

        number = len(self._threads)
        self._threads.append(threading.Thread(target=ask))
        self._threads[-1].start()

    def wait(self):
        for thread in self._threads:
            thread.join(PATIENCE)
        return [self.answers.get(number) for number in range(len(self._threads))]


def has_no_traceback(capsys):
    """uvicorn keeps its log from whoever would catch it."""
    return "Traceback" not in capsys.readouterr().err


FOR_EVER = 10 * PATIENCE  # seconds


@pytest.mark.parametrize(
    "is_drained", by_day([False, True], 2), ids=["while it drains", "while its engine ends"]
)
def test_a_second_signal_ends_every_request_with_an_error_in_the_middle_of_a_step(
    world, capsys, monkeypatch, tmp_path, is_drained
):
    """The engine stands still: nobody who waited for a step would ever end."""
    seconds = 0 if is_drained else FOR_EVER
    with serving(world, "qv", in_a_process=True, drain_seconds=seconds) as server:
        llm, asking = server.server.state.llm, Asking(server)
        monkeypatch.setattr(llm, "shutdown", lambda timeout=2 * PATIENCE: AsyncLLM.shutdown(llm, timeout))
        go, stands = tmp_path / "go", tmp_path / "stands"
        llm._client.call(wait_for, go)
        llm._client.call(stand_still_after, 3, stands)
        body = {"model": "qv", "prompt": "long", "max_tokens": 120, "ignore_eos": True}
        for more in ({"stream": True}, {}, {"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "stream": True}):
            asking.send(**{**body, **more})
        wait_until(lambda: len(llm._client._requests) == 6)
        go.touch()
        wait_until(stands.exists)
        waits = llm._client.call(process_id)
        drain(server)
        if is_drained:
            wait_until(lambda: llm._client._is_stopping)
        drain(server)
        stream, whole, several, streams = asking.wait()
        server._thread.join(PATIENCE)

        assert not server._thread.is_alive()
        assert llm._client._process.returncode is not None
        assert waits.exception(PATIENCE) is not None
    for answer in (whole, several):
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    for answer in (stream, streams):
        told = answer.text  # of a stream that had not begun by then
        if answer.status_code == 200:
            *_, told, done = [line for line in answer.text.splitlines() if line]
            assert done == "data: [DONE]"
        assert json.loads(told.removeprefix("data: "))["error"]["code"] == 503
    assert has_no_traceback(capsys)


@pytest.mark.nightly
def test_a_second_signal_ends_what_does_not_end_with_the_engine(world, capsys):
    """A prompt that is being tokenized, a body that does not come, and a client that reads nothing."""
    let_go = threading.Event()
    with serving(world, "qv", in_a_process=True, drain_seconds=FOR_EVER) as server:
        llm, asking = server.server.state.llm, Asking(server)
        server.server.config.timeout_graceful_shutdown = FOR_EVER
        waiting = noted_calls(llm._tokenizing)
        llm._tokenizing._executor.submit(let_go.wait, PATIENCE)
        for stream in (False, True):
            asking.send(model="qv", prompt="text", stream=stream)
        wait_until(lambda: len(waiting) == 2)
        with no_body(server) as half, no_reader(server) as deaf:
            for _ in range(2):
                drain(server)
            server._thread.join(PATIENCE)
            assert not server._thread.is_alive()
            answer = half.recv(10_000)
            deaf.recv(1)
        answers = asking.wait()
        let_go.set()

    assert [each.status_code for each in answers] == [503, 503]
    assert answers[0].json()["error"]["type"] == "ServiceUnavailableError"
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert has_no_traceback(capsys)


def no_body(server):
    """A connection whose request never comes to its end."""
    sock = socket.create_connection(server.socket.getsockname(), timeout=PATIENCE)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    wait_until(lambda: any(connection.cycle for connection in server.server.server_state.connections))
    return sock


def no_reader(server):
    """A connection that is sent more than it takes."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    sock.connect(server.socket.getsockname())
    sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
    wait_until(
        lambda: any(connection.flow.write_paused for connection in server.server.server_state.connections)
    )
    return sock


def test_a_server_that_waits_in_vain_for_its_requests_answers_them(world, capsys):
    """After one signal, too: what does not end with the engine gets an error, and not a traceback in the log."""
    let_go = threading.Event()
    with serving(world, "qv", drain_seconds=0) as server:
        asking = Asking(server)
        server.server.config.timeout_graceful_shutdown = 0.1
        waiting = noted_calls(server.server.state.llm._tokenizing)
        server.server.state.llm._tokenizing._executor.submit(let_go.wait, PATIENCE)
        asking.send(model="qv", prompt="text")
        wait_until(lambda: waiting)
        drain(server)
        answers = asking.wait()
        let_go.set()
        server._thread.join(PATIENCE)

        assert not server._thread.is_alive()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["type"] == "ServiceUnavailableError"
    assert has_no_traceback(capsys)


def test_a_server_ends_with_its_engine_and_says_why(world):
    with serving(world, "qv") as server:
        server.server.ends_with_engine = True
        server.server.state.llm._client.call(break_steps)
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"model": "qv", "prompt": "x"}, timeout=PATIENCE
        )
        server._thread.join(PATIENCE)

        assert not server._thread.is_alive()
    assert answer.status_code == 503
    assert isinstance(server._error, EngineDeadError) and "a step that is broken" in str(server._error)


@contextmanager
def command_of(world, *options):
    """`minivllm serve` once it serves: the process and its address."""
    command = [
        sys.executable,
        "-m",
        "minivllm.cli",
        "serve",
        str(world.base),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        while "Serving" not in (line := process.stderr.readline()):
            assert process.poll() is None, line
        yield process, line.split()[-1].removesuffix("/v1")
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
def test_a_second_signal_ends_the_command(world):
    options = "--dtype", "float64", "--drain-seconds", str(FOR_EVER)
    with command_of(world, *options) as (process, url):
        model = httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
        # More than it can answer in a minute.
        body = {"model": model, "prompt": ["long"] * 64, "n": 8, "max_tokens": 120, "ignore_eos": True}
        asked = {"json": {**body, "stream": True}, "timeout": PATIENCE}
        with httpx.stream("POST", f"{url}/v1/completions", **asked) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            while httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200:
                pass
            process.send_signal(signal.SIGINT)
            events = [line for line in lines if line]
        log = process.stderr.read()
        assert process.wait(PATIENCE) == 130

    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 503
    assert "Traceback" not in log, log


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)], ids=lambda n: n.name
)
def test_a_signal_ends_the_command_when_its_requests_have_ended(world, number):
    """By day the only engine in a fresh interpreter, as users have it; other tests' are forks."""
    adapter = "--lora-modules", f"qv={world.path('qv')}"
    with command_of(world, "--dtype", "float64", *adapter, "--served-model-name", "tiny") as (process, url):
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
    assert answers[0].json()["choices"][0]["text"] == Answers(world).text("qv", "bye", 100)


@pytest.mark.nightly
def test_the_command_ends_when_its_engine_has_died(world):
    """So that what watches it starts it again; docker and systemd look at processes, not at /health."""
    with command_of(world) as (process, _):
        lists = Path(f"/proc/{process.pid}/task").glob("*/children")
        children = [pid for each in lists for pid in each.read_text().split()]
        named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        [engine] = [pid for pid, words in named.items() if b"resource_tracker" not in words]
        os.kill(int(engine), signal.SIGKILL)
        log = process.stderr.read()

        assert process.wait(PATIENCE) == 2
    assert "error: the engine's process has ended (killed by signal 9)" in log
    assert "Traceback" not in log, log
