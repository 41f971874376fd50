"""What the server costs: streams over HTTP beside the same engine without it. See README.md.

    python -m benchmarks.server --model demo --streams 32

In every round the engine first steps through the requests by itself, then the same requests come as streams from a
client in another process. Both have the same engine, threads and memory.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.adapters import write_adapters
from benchmarks.arguments import SHAPE_NAMES, device, run_as_command, whole
from benchmarks.decode import prompts
from benchmarks.direct import cpu_seconds, make_engine, run_direct
from benchmarks.options import engine_args, model_folder
from benchmarks.report import Report, default_path
from minivllm.config import SchedulerConfig
from minivllm.engine_args import EngineArgs
from minivllm.lora.request import LoRARequest
from minivllm.models.demo_model import demo_model_path
from minivllm.processes import avoid_pauses
from minivllm.server.app import build_app
from minivllm.server.run import ServerThread
from minivllm.server.settings import ServerSettings
from minivllm.serving.async_llm import AsyncLLM
from minivllm.serving.engine_process import EngineProcess

NAME = "python -m benchmarks.server"
BASE = "base"


def parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog=NAME, description=__doc__.splitlines()[0])
    shapes = ", ".join(SHAPE_NAMES)
    parser.add_argument("--model", default="demo", help=f"demo, with its text; or random weights: {shapes}")
    parser.add_argument("--streams", type=whole(), default=32)
    parser.add_argument("--adapters", type=whole(0), default=4, help="taken in turns; 0 is the base alone")
    parser.add_argument("--prompt-tokens", type=whole(), default=32)
    parser.add_argument("--output-tokens", type=whole(2), default=64)
    parser.add_argument(
        "--max-num-batched-tokens", type=whole(), default=SchedulerConfig.max_num_batched_tokens
    )
    parser.add_argument("--rounds", type=whole(), default=3)
    parser.add_argument("--rank", type=whole(), default=16)
    parser.add_argument("--device", type=device, default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=whole(), help="of the engine; as many as are fastest if not given")
    parser.add_argument(
        "--step-ms", type=whole(), help="stand in for a GPU whose steps of one token a stream take so long"
    )
    parser.add_argument(
        "--engine", choices=("process", "thread"), default="process", help="its own, or of the server's"
    )
    parser.add_argument("--json", type=Path, help="result file; one that is there grows")
    parsed = parser.parse_args(arguments)
    parsed.punica_backend, parsed.target_modules, parsed.batch_invariant = "auto", None, False
    parsed.tensor_parallel_size, parsed.disable_custom_all_reduce = 1, False
    parsed.fully_sharded_loras = parsed.enable_dora = False
    parsed.max_model_len = parsed.prompt_tokens + parsed.output_tokens
    return parsed


def make_llm(options: Namespace) -> AsyncLLM:
    """Around the demo model with its tokenizer, or a shape without one."""
    args = engine_args(options, options.streams, options.max_model_len, options.adapters)
    if options.is_demo:
        args = EngineArgs(**{**vars(args), "load_format": "auto", "skip_tokenizer_init": False})
    if options.engine == "thread":
        return AsyncLLM.from_engine(make_engine(args, options.step_ms))
    make = partial(make_engine, args, options.step_ms)
    return AsyncLLM(EngineProcess(make, more_calls=(run_direct, cpu_seconds)))


def run_streams(
    server: ServerThread, token_ids: list[list[int]], adapters: list[LoRARequest], max_tokens: int
) -> tuple[int, float, list[float]]:
    """The same requests from another process: tokens, seconds, and those to each first token."""
    models = [adapter.lora_name for adapter in adapters] or [BASE]
    asked = {
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    bodies = [
        {"model": models[number % len(models)], "prompt": ids, **asked}
        for number, ids in enumerate(token_ids)
    ]
    host, port = server.socket.getsockname()
    command = [sys.executable, "-m", "benchmarks.sse_client", host, str(port)]
    client = subprocess.run(command, input=json.dumps(bodies), capture_output=True, text=True, check=False)
    if client.returncode:
        raise RuntimeError(f"the client failed: {client.stderr.splitlines()[-1]}")
    streams = json.loads(client.stdout)
    started = min(stream["sent"] for stream in streams)
    seconds = max(stream["events"][-1] for stream in streams) - started
    ttft = [stream["events"][0] - stream["sent"] for stream in streams]
    return sum(stream["tokens"] for stream in streams), seconds, ttft


def summary(num_tokens: int, seconds: float, ttft: list[float], cpu_seconds: float) -> dict[str, float]:
    """cpu_seconds: of the engine and the server, in whichever processes they are"""
    p50, p99 = np.percentile(ttft, (50, 99)) * 1e3
    return {
        "tokens_per_second": num_tokens / seconds,
        "ttft_p50_ms": float(p50),
        "ttft_p99_ms": float(p99),
        "cpu_us_per_token": 1e6 * cpu_seconds / num_tokens,
    }


def measure(options: Namespace, report: Report, folder: Path) -> None:
    """Rounds of both, after one of each that is not counted; then their medians."""
    adapters = write_adapters(folder, options.model, options.adapters, options.rank)
    llm = make_llm(options)
    vocab_size = llm.config.model_config.get_vocab_size()
    token_ids = list(prompts(options.streams, options.prompt_tokens, vocab_size))
    settings = ServerSettings(BASE, adapters=tuple(adapters), max_concurrency=4 * options.streams)
    rows: dict[str, list[dict[str, float]]] = {"engine": [], "server": []}
    try:
        app = build_app(llm, settings)
        avoid_pauses()
        with ServerThread(app, settings) as server:
            for number in range(-1, options.rounds):
                work = token_ids, adapters, options.output_tokens
                direct = asyncio.run(llm.call(run_direct, *work))
                cpu = cpu_of_both(llm)
                streams = run_streams(server, *work)
                found = {
                    "engine": summary(*direct),
                    "server": summary(*streams, cpu_of_both(llm) - cpu),
                }
                for kind, row in found.items() if number >= 0 else ():
                    rows[kind].append(row)
                    report.add({"kind": kind, "round": number, **row})
    finally:
        llm.shutdown()
    report.add(compare(rows))


def cpu_of_both(llm: AsyncLLM) -> float:
    """Seconds of the server's process, and of the engine's if that is another one."""
    of_engine = asyncio.run(llm.call(cpu_seconds))
    return of_engine + (time.process_time() if isinstance(llm._client, EngineProcess) else 0)


def compare(rows: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Medians over the rounds."""
    middle = {
        kind: {name: float(np.median([row[name] for row in of])) for name in of[0]}
        for kind, of in rows.items()
    }
    engine, server = middle["engine"], middle["server"]
    return {
        "kind": "medians",
        "engine_tokens_per_second": engine["tokens_per_second"],
        "server_tokens_per_second": server["tokens_per_second"],
        "share": server["tokens_per_second"] / engine["tokens_per_second"],
        "ttft_p50_more_ms": server["ttft_p50_ms"] - engine["ttft_p50_ms"],
        "cpu_us_more_per_token": server["cpu_us_per_token"] - engine["cpu_us_per_token"],
    }


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    path = options.json or default_path("server", options.device)
    kept = {key: value for key, value in vars(options).items() if key != "json"}
    report = Report(path, "server", kept, options.device)
    options.is_demo = options.model == "demo"
    options.model = str(demo_model_path()) if options.is_demo else model_folder(options.model)
    with tempfile.TemporaryDirectory() as folder:
        measure(options, report, Path(folder))


if __name__ == "__main__":
    run_as_command(NAME, main)
