"""What a request costs before an engine has it: processor time of the server's process. See README.md.

    python -m benchmarks.request_cost

Requests come as bytes, so many at once, and go to an engine's process that does nothing. There are no sockets for HTTP.
"""

import asyncio
import gc
import json
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import uvicorn
from transformers import AutoTokenizer
from uvicorn.server import ServerState

from benchmarks.arguments import run_as_command, whole
from benchmarks.report import Report, default_path
from minivllm.config import EngineConfig
from minivllm.engine_args import EngineArgs
from minivllm.models.demo_model import demo_model_path
from minivllm.processes import avoid_pauses
from minivllm.server.app import build_app
from minivllm.server.connection import LimitedConnection
from minivllm.server.settings import ServerSettings
from minivllm.serving import engine_process
from minivllm.serving.async_llm import AsyncLLM

NAME = "python -m benchmarks.request_cost"
BASE = "base"
TEXT = "Which employees live in Oslo and earn more than the mean of their department? Answer in SQL."
HEADERS = (
    "host: x",
    "accept: */*",
    "user-agent: x",
    "authorization: Bearer x",
    "content-type: application/json",
)


class DeafEngine(engine_process.EngineProcess):
    """It is made at once, and nobody is there.   num_begun: requests that it was given"""

    def __init__(self, config: EngineConfig, tokenizer: Any) -> None:
        self._made, self.num_begun = (config, tokenizer), 0
        super().__init__(lambda: None)

    def _load(self, *_: Any) -> tuple[EngineConfig, Any]:
        return self._made

    def begin(self, *args: Any, **options: Any) -> None:
        super().begin(*args, **options)
        self.num_begun += 1


class Connection(asyncio.Transport):
    """A client that has sent something and waits.   answer: what was written"""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 8000), "peername": ("127.0.0.1", 50000)})
        self.answer = b""

    def write(self, data: bytes) -> None:
        self.answer += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


def parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog=NAME, description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", type=whole(), default=128)
    parser.add_argument("--requests", type=whole(), default=2000, help="in each round")
    parser.add_argument("--rounds", type=whole(), default=5)
    parser.add_argument("--json", type=Path, help="result file; one that is there grows")
    return parser.parse_args(arguments)


def requests() -> dict[str, bytes]:
    """Kind of a request -> its bytes."""
    asked = {"model": BASE, "max_tokens": 64, "temperature": 0, "stream": True}
    ids = [random.Random(0).randrange(1, 1000) for _ in range(32)]
    messages = [{"role": "system", "content": "You write SQL."}, {"role": "user", "content": TEXT}]
    return {
        "token ids": sent("/v1/completions", {**asked, "prompt": ids}),
        "text": sent("/v1/completions", {**asked, "prompt": TEXT}),
        "chat": sent("/v1/chat/completions", {**asked, "messages": messages}),
    }


def sent(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1", *HEADERS, f"content-length: {len(content)}", "", ""
    return "\r\n".join(lines).encode() + content


async def cost(config: uvicorn.Config, engine: DeafEngine, data: bytes, number: int) -> tuple[float, float]:
    """Seconds of the loop's thread and of the whole process, from first bytes until all are handed over."""
    state, connections = ServerState(), []
    for _ in range(number):
        connections.append(config.http_protocol_class(config, state, {}, asyncio.get_running_loop()))
        connections[-1].connection_made(Connection())
    wanted = engine.num_begun + number
    thread, process = time.thread_time(), time.process_time()
    for connection in connections:
        connection.data_received(data)
    while engine.num_begun < wanted:
        await asyncio.sleep(0.001)
        if answers := [each.transport.answer for each in connections if each.transport.answer]:
            raise RuntimeError(f"the request was answered: {answers[0]!r}")
    await asyncio.sleep(0)  # they are sent
    found = time.thread_time() - thread, time.process_time() - process
    for connection in connections:
        connection.connection_lost(None)
    while state.tasks:
        await asyncio.sleep(0.001)
    return found


async def measure(options: Namespace, report: Report, config: uvicorn.Config, engine: DeafEngine) -> None:
    for kind, data in requests().items():
        await cost(config, engine, data, options.at_once)
        rounds = []
        for _ in range(options.rounds):
            gc.collect()
            times = -(-options.requests // options.at_once)
            found = [await cost(config, engine, data, options.at_once) for _ in range(times)]
            rounds.append([1e6 * sum(each) / (times * options.at_once) for each in zip(*found)])
        thread, process = map(median, zip(*rounds))
        report.add({"kind": kind, "cpu_us_of_the_loop": thread, "cpu_us": process})


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    kept = {key: value for key, value in vars(options).items() if key != "json"}
    report = Report(options.json or default_path("request-cost", "cpu"), "request_cost", kept, "cpu")
    model = str(demo_model_path())
    engine_process.HOST = "benchmarks.deaf_host"
    engine = DeafEngine(EngineArgs(model=model).create_engine_config(), AutoTokenizer.from_pretrained(model))
    llm, settings = AsyncLLM(engine), ServerSettings(BASE, max_concurrency=4 * options.at_once)
    http = partial(LimitedConnection, settings=settings)
    config = uvicorn.Config(build_app(llm, settings), http=http, access_log=False, log_level="warning")
    config.load()
    avoid_pauses()
    try:
        asyncio.run(measure(options, report, config, engine))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    run_as_command(NAME, main)
