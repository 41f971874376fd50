"""Bytes that no client sends: broken heads, broken bodies, connections that end anywhere."""

import json
import random
import socket

import openai
import pytest

from tests.tools.nights import of_night
from tests.worlds.servers import Answers, client_of, serving
from tests.worlds.waiting import PATIENCE, wait_until

BODY = {"model": "qv", "prompt": "whole", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
GARBAGE = [
    b"\0",
    b"\xff",
    b"\r\n",
    b"\n",
    b"\r",
    b": ",
    b"\x7f",
    b"%00",
    b"\xc3\x28",
    b"{}",
    b"A" * 300,
    b" ",
]


@pytest.fixture(scope="module")
def server(world):
    with serving(world, "qv", read_seconds=0.3, write_seconds=2.0) as server:
        yield server


def request(stream=True, path="/v1/completions", **changes):
    body = json.dumps({**BODY, "stream": stream, **changes}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def mutated(rng, content):
    """A few bytes changed, left out, or put in."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) + 1)
        kind = rng.randrange(3)
        if kind == 0:
            content[at:at] = rng.choice(GARBAGE)
        elif kind == 1:
            del content[at : at + rng.randint(1, 20)]
        else:
            content[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(content)


def talk(server, content, read_at_most, rng):
    """Send these bytes, read at most so many, and leave, at times without a goodbye. What was read."""
    with socket.create_connection(server.socket.getsockname(), timeout=PATIENCE) as sock:
        if rng.random() < 0.3:
            linger = b"\1\0\0\0\0\0\0\0"
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        answer = b""
        try:
            sock.sendall(content)
            sock.settimeout(0.02 if read_at_most < 10_000 else 0.5)
            while len(answer) < read_at_most and (piece := sock.recv(min(4096, read_at_most))):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
    return answer


def assert_whole(server, world):
    engine = server.server.state.llm._client.engine
    wait_until(lambda: not engine.has_unfinished_requests())

    assert whole_answer(server) == Answers(world).text("qv", "whole", 40)
    assert not engine.scheduler.requests
    assert all(count == 0 for count in engine.scheduler.kv_cache.block_pool.ref_cnt[1:])


def whole_answer(server):
    """A server that is told to wait for a body so shortly may, on a busy machine, find no time to read it: 408."""
    with client_of(server) as client:
        while True:
            try:
                answer = client.completions.create(
                    model="qv", prompt="whole", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
                )
                return answer.choices[0].text
            except openai.APIStatusError as error:
                assert error.status_code == 408


def fuzz(server, rounds, seed):
    """Random conversations; no answer may say that the server failed."""
    rng = random.Random(seed)
    for number in range(rounds):
        path = rng.choice(
            ["/v1/completions", "/v1/completions", "/tokenize", "/v1/load_lora_adapter", "/metrics"]
        )
        content = request(stream=rng.random() < 0.7, path=path)
        kind = rng.randrange(3)
        if kind == 0:
            content = mutated(rng, content)
        elif kind == 1:
            content = content[: rng.randrange(len(content))]
        answer = talk(server, content, rng.choice([0, 1, 50, 400, 10_000]), rng)

        assert not answer.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5")), (seed, number, content, answer)


def test_no_bytes_and_no_early_end_harm_other_requests(server, world):
    fuzz(server, rounds=60, seed=0)

    assert_whole(server, world)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", of_night(range(1, 7), 3))
def test_random_bytes_harm_no_other_request(server, world, seed):
    fuzz(server, rounds=600, seed=seed)

    assert_whole(server, world)


def test_a_client_that_reads_nothing_is_cut_off_and_delays_no_other(server, world):
    """Its answer is far larger than what lies between server and reader."""
    content, llm = request(prompt=["x"] * 60, max_tokens=100, logprobs=90), server.server.state.llm
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(server.socket.getsockname())
        sock.sendall(content)
        wait_until(lambda: llm._open)

        assert whole_answer(server) == Answers(world).text("qv", "whole", 40)
        wait_until(lambda: not llm._open)  # and the reader is still connected
    assert_whole(server, world)
