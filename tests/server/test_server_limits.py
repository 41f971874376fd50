"""Limits on one request and on all together; connections that stop half way."""

import asyncio
import http.client
import itertools
import json
import select
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from minivllm.commands.serve import allowed_hosts
from minivllm.server.connection import BufferForHTTP10, LimitedConnection
from minivllm.server.settings import ServerSettings
from tests.worlds.servers import held_up, serving
from tests.worlds.waiting import PATIENCE, wait_until

ASK = {"model": "qv", "prompt": "x", "max_tokens": 2, "temperature": 0}
LIMITS = {
    "max_body_bytes": 2000,
    "max_header_bytes": 4000,
    "max_concurrency": 3,
    "read_seconds": PATIENCE,
    "write_seconds": PATIENCE,
}


@pytest.fixture(scope="module")
def server(world):
    with serving(world, "qv", **LIMITS) as server:
        yield server


def engine_of(server):
    return server.server.state.llm._client.engine


def settle(server):
    """Wait until the engine has no request left."""
    wait_until(lambda: not engine_of(server).has_unfinished_requests())


def post(server, content, **headers):
    return httpx.post(
        f"{server.url}/v1/completions",
        content=content,
        headers={"content-type": "application/json", **headers},
        timeout=PATIENCE,
    )


def connected(server):
    host, port = server.socket.getsockname()
    return socket.create_connection((host, port), timeout=PATIENCE)


def is_closed(sock):
    """Whether the server has answered or has closed the connection."""
    return bool(select.select([sock], [], [], 0)[0])


def next_answer(answers, status=b"200 OK"):
    """The JSON of the next answer that comes over a connection."""
    assert answers.readline() == b"HTTP/1.1 %b\r\n" % status
    headers = http.client.parse_headers(answers)
    return json.loads(answers.read(int(headers["content-length"])))


def head(length, *lines):
    words = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", *lines]
    return "\r\n".join([*words, f"content-length: {length}", "", ""]).encode()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server):
    with connected(server) as sock:
        sock.sendall(head(10**9))
        answer = sock.recv(10_000)

    assert b" 413 " in answer.split(b"\r\n")[0]


def test_a_body_that_grows_too_large_is_refused(server):
    def chunks():
        for _ in range(30):
            yield b" " * 100

    assert post(server, chunks()).status_code == 413
    assert post(server, json.dumps({**ASK, "prompt": "x" * 1990})).status_code == 413
    assert post(server, json.dumps(ASK)).status_code == 200


@pytest.mark.parametrize("depth", [202, 958])
def test_a_body_that_is_nested_too_deep_is_refused_in_one_sentence(server, depth):
    nested = "[" * depth + "]" * depth
    ways = "application/json", "application/json; charset=utf-8"

    answers = [post(server, nested, **{"content-type": way}) for way in ways]

    assert [answer.status_code for answer in answers] == [400, 400]
    told = {answer.json()["error"]["message"] for answer in answers}
    assert told == {"the body is no JSON: recursion limit exceeded at line 1 column 202"}


def test_brackets_beside_each_other_or_in_strings_are_not_nested(server):
    beside = {**ASK, "prompt": [[5]] * 3, "logit_bias": {}, "stop": ["]" * 3, '"' + "[" * 300, "\\"]}
    deep = json.dumps({**ASK, "prompt": "HERE"}).replace('"HERE"', "[" * 199 + "]" * 199)

    assert post(server, json.dumps(beside)).status_code == 200
    assert post(server, "[" + "[]," * 300 + "[]]").json()["error"]["message"].startswith("the body: Input")
    assert post(server, deep).json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("offer", "cuts"),
    [("Upgrade: h2c", []), ("Upgrade: h2c", [0, 9]), ("Upgrade: websocket", [0]), ("Upgrade: h2c", [-30, 5])],
    ids=str,
)
def test_an_offer_of_another_protocol_is_passed_over(server, offer, cuts):
    body = json.dumps(ASK).encode()
    request = head(len(body), offer, "connection: Upgrade, HTTP2-Settings", "http2-settings: AAMAAABk") + body
    places = [0, *(len(request) - len(body) + cut for cut in cuts), len(request)]

    with connected(server) as sock, sock.makefile("rb") as answers:
        for start, end in itertools.pairwise(places):
            sock.sendall(request[start:end])
            time.sleep(0.05)
        first = next_answer(answers)
        sock.sendall(request)  # the connection is as good as before
        second = next_answer(answers)

    assert first["choices"][0]["text"] == second["choices"][0]["text"] != ""


def test_offers_that_come_together_are_answered_in_turn(server):
    body = json.dumps(ASK).encode()
    ask = head(len(body), "Upgrade: h2c", "Connection: upgrade") + body
    chunked = head(0, "Upgrade: h2c", "Connection: upgrade", "Transfer-Encoding: chunked")
    chunked = chunked.replace(b"content-length: 0\r\n", b"") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    look = b"GET /version HTTP/1.1\r\nhost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"

    with connected(server) as sock, sock.makefile("rb") as answers:
        sock.sendall(ask + look + chunked)
        first, second, third = (next_answer(answers) for _ in range(3))

    assert first["choices"] == third["choices"]
    assert "version" in second


def test_a_tunnel_is_refused(server):
    with connected(server) as sock:
        sock.sendall(b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n")
        answer = sock.recv(10_000)

    assert answer.startswith(b"HTTP/1.1 40")


def test_too_many_headers_are_refused(server):
    many = post(server, json.dumps(ASK), **{f"x-{i}": "1" for i in range(120)})
    long = post(server, json.dumps(ASK), x="y" * 5000)

    assert (many.status_code, long.status_code) == (431, 431)
    assert post(server, json.dumps(ASK)).status_code == 200


def test_a_line_without_an_end_is_refused(server):
    with connected(server) as sock:
        sock.sendall(b"GET /" + b"a" * 20_000)
        answer = sock.recv(10_000)

    assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "before",
    [
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx-trailer: ",
    ],
    ids=["header", "trailer"],
)
def test_a_header_without_an_end_is_refused_before_it_is_kept(server, monkeypatch, before):
    """Counted is what the server has read, a piece at a time: the system takes more for one that has no time to."""
    read, data_received = [], LimitedConnection.data_received
    monkeypatch.setattr(
        LimitedConnection,
        "data_received",
        lambda self, data: read.append(len(data)) or data_received(self, data),
    )

    with connected(server) as sock:
        sock.sendall(before)
        for sent in range(len(before), 400_000, 1000):
            wait_until(lambda sent=sent: sum(read) == sent or is_closed(sock))
            if is_closed(sock):
                break
            sock.sendall(b"a" * 1000)

    assert len(before) < sum(read) < 40_000
    assert post(server, json.dumps(ASK)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_has_chunks_where_http_knows_them(server, version, stream):
    content = json.dumps({**ASK, "stream": stream}).encode()
    asked = head(len(content), "connection: close").replace(b"HTTP/1.1", f"HTTP/{version}".encode())

    with connected(server) as sock:
        sock.sendall(asked + content)
        answer = b"".join(iter(lambda: sock.recv(10_000), b""))

    head_of_it, _, body = answer.partition(b"\r\n\r\n")
    is_chunked = stream and version == "1.1"
    assert head_of_it.split(b"\r\n")[0].endswith(b" 200 OK")
    assert (b"transfer-encoding: chunked" in head_of_it) == is_chunked
    assert body.startswith(b"data: {" if stream else b"{") != is_chunked
    assert body.endswith(b"data: [DONE]\n\n" if stream else b"}") != is_chunked
    assert body.endswith(b"\r\n0\r\n\r\n") == is_chunked


class Reader(asyncio.Transport):
    """A client that has left so many bytes in the server's buffer whenever that is looked at."""

    def __init__(self, *left):
        super().__init__()
        self.left, self.is_cut_off = list(left), False

    def get_write_buffer_size(self):
        return self.left.pop(0)

    def abort(self):
        self.is_cut_off = True


@pytest.mark.parametrize(
    ("left", "is_cut_off"), [([90, 60, 60], True), ([90, 90], True), ([90, 60, 30], False)], ids=str
)
def test_a_reader_is_cut_off_once_it_has_taken_nothing_for_so_long(left, is_cut_off):
    reader = Reader(*left)

    async def main():
        settings = ServerSettings("tiny", write_seconds=0.01)
        connection = LimitedConnection(
            uvicorn.Config(None), ServerState(), {}, asyncio.get_running_loop(), settings=settings
        )
        connection.connection_made(reader)
        connection.pause_writing()
        while reader.left:
            await asyncio.sleep(0.005)
        connection.resume_writing()  # it has taken enough; nobody looks again
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert reader.is_cut_off == is_cut_off


def test_many_small_requests_on_a_connection_are_no_long_head(server):
    statuses = []

    with httpx.Client(timeout=PATIENCE) as client:
        for _ in range(40):
            statuses.append(client.get(f"{server.url}/v1/models", headers={"x-some": "y" * 1000}).status_code)

    assert statuses == [200] * 40


def test_a_body_in_many_small_parts_is_read(server):
    content = json.dumps(
        {**ASK, "user": "x" * 1500}
    ).encode()  # with the sizes of its parts above a head's limit

    answer = post(server, (content[i : i + 1] for i in range(len(content))))

    assert answer.status_code == 200, answer.text


def test_a_body_that_does_not_come_is_waited_for_no_longer_than_allowed(world):
    with (
        serving(world, read_seconds=0.2) as server,
        connected(server) as sock,
        sock.makefile("rb") as answers,
    ):
        sock.sendall(head(100) + b'{"model"')
        answer = next_answer(answers, b"408 Request Timeout")

    assert answer["error"]["message"] == "the body was not there after 0.2 s; send it at once"


def test_more_requests_than_allowed_get_429_and_may_retry(server):
    slow = json.dumps({**ASK, "max_tokens": 100, "ignore_eos": True, "prompt": "slow"})
    statuses = []

    def ask():
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            content=slow,
            headers={"content-type": "application/json"},
            timeout=PATIENCE,
        ) as response:
            statuses.append((response.status_code, response.headers.get("retry-after")))
            response.read()

    threads = [threading.Thread(target=ask) for _ in range(12)]
    with held_up(server):  # nobody is answered before all have asked
        for thread in threads:
            thread.start()
        wait_until(lambda: len(statuses) == 12 - LIMITS["max_concurrency"])
    for thread in threads:
        thread.join()

    assert sorted(statuses) == [(200, None)] * 3 + [(429, "1")] * 9
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
    assert post(server, json.dumps(ASK)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_the_connection_aborts_its_request(server, stream):
    llm = server.server.state.llm
    answered = engine_of(server).metrics.finished["length"]
    body = json.dumps({**ASK, "max_tokens": 110, "ignore_eos": True, "stream": stream}).encode()
    with held_up(server):
        with connected(server) as sock:
            sock.sendall(head(len(body)) + body)
            wait_until(lambda: llm._open)
        wait_until(lambda: not llm._open)

    settle(server)
    assert engine_of(server).metrics.finished["length"] == answered
    assert post(server, json.dumps(ASK)).status_code == 200


def test_the_queue_of_the_engine_is_full_before_its_memory_is(world):
    with serving(world, "qv", max_queued=0, engine={"max_num_seqs": 1}) as server:
        body = json.dumps({**ASK, "max_tokens": 110, "ignore_eos": True})
        with (
            held_up(server, after_steps=4) as let_go,
            httpx.stream(
                "POST",
                f"{server.url}/v1/completions",
                content=json.dumps({**json.loads(body), "stream": True}),
                headers={"content-type": "application/json"},
                timeout=PATIENCE,
            ) as stream,
        ):
            events = stream.iter_lines()
            next(events)
            refused = post(server, body)
            let_go()
            rest = list(events)

        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert rest[-2] == "data: [DONE]"
        settle(server)
        assert post(server, json.dumps(ASK)).status_code == 200


def test_pages_of_one_origin_may_be_allowed(world):
    with serving(world, allowed_origins=("https://page.example",)) as server:
        asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
        allowed = httpx.options(f"{server.url}/v1/completions", headers=asked, timeout=PATIENCE)
        other = httpx.options(
            f"{server.url}/v1/completions", headers={**asked, "origin": "https://x.example"}, timeout=PATIENCE
        )

    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_of_unknown_length_has_one_for_a_client_that_knows_no_chunks(version):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        for number, part in enumerate((b"one ", b"two ", b"")):
            await send({"type": "http.response.body", "body": part, "more_body": number < 2})

    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(BufferForHTTP10(app)({"type": "http", "http_version": version}, None, send))

    whole = [(b"x-own", b"1"), *([(b"content-length", b"8")] if version == "1.0" else [])]
    assert sent[0]["headers"] == whole
    assert b"".join(message["body"] for message in sent[1:]) == b"one two "
    assert len(sent) == (2 if version == "1.0" else 4)


@pytest.mark.parametrize("origin", ["foo", "page.example", "https://page.example/path", "https://", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(
        ValueError, match=r"is no origin of web pages; give one like https://page\.example, or \*"
    ):
        ServerSettings("tiny", allowed_origins=("https://page.example:8443", "*", origin))


def test_a_name_that_somebody_else_has_led_here_is_refused(world):
    """DNS rebinding: a page of that name asks a server without a key on this machine, and would read its answers."""
    names = allowed_hosts("127.0.0.1", ["Lab.local"], has_keys=False)
    with serving(world, allowed_hosts=names) as server:

        def status(*lines):
            with connected(server) as sock:
                sock.sendall(
                    "\r\n".join(["GET /v1/models HTTP/1.1", *lines, "connection: close", "", ""]).encode()
                )
                return sock.recv(10_000).split()[1]

        port = server.socket.getsockname()[1]
        mine = [f"127.0.0.1:{port}", "localhost", "LOCALHOST:9", "[::1]:8000", "lab.local", "127.0.0.1:"]
        assert {status(f"host: {name}") for name in mine} == {b"200"}
        assert {status(f"host: {name}") for name in ("evil.example", f"127.0.0.1.evil:{port}", "")} == {
            b"403"
        }


@pytest.mark.parametrize(
    ("host", "more", "has_keys"),
    [("0.0.0.0", [], False), ("127.0.0.1", [], True), ("127.0.0.1", ["*"], False), ("10.1.2.3", [], False)],
)
def test_any_name_will_do_where_a_key_is_asked_for_or_others_reach_the_server(host, more, has_keys):
    assert allowed_hosts(host, more, has_keys) == ()
