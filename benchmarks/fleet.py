"""How often a request finds its adapter in a slot, where Ray Serve sends it to an engine that has it, and where not.

`python -m benchmarks.fleet`, with the extra `ray`. A tiny model with random weights: only the routing is measured.
"""

import asyncio
import json
import random
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import httpx
import ray
import torch
import typer
from ray import serve
from rich.table import Table

from benchmarks.report import machine
from deploy.fleet.__main__ import start_ray
from deploy.fleet.arguments import FleetArgs
from deploy.fleet.ray_app import ENGINE, application
from minivllm.assembly import LLMEngine
from minivllm.commands.common import console
from minivllm.commands.random_adapter import save_random_adapter
from minivllm.commands.tiny_demo import CONFIG

APP = "measured"
ADAPTERS, SLOTS, REPLICAS = 40, 4, 2
ENGINE_OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_loras": SLOTS,
    "max_cpu_loras": ADAPTERS,
    "max_lora_rank": 4,
    "num_kv_blocks": 200,
    "warm_up": False,
}
ROUTINGS = ("random", "ray", "hashing", "bounded-hashing", "affine")
PROMPT, MAX_TOKENS = [5, 11, 17], 2


def main(
    out: Annotated[Path | None, typer.Option(help="a JSON file for the results")] = None,
    requests: Annotated[
        int, typer.Option(help="of each way, after a tenth as many that are not counted")
    ] = 800,
    rate: Annotated[float, typer.Option(help="requests a second, at random times")] = 15.0,
    port: Annotated[int, typer.Option(help="of the server")] = 8765,
) -> None:
    """Zipf's law with alpha 1 over 40 adapters, two engines with four slots each; the same requests each way."""
    with tempfile.TemporaryDirectory() as folder:
        modules = write_world(Path(folder))
        start_ray(cpus=2)
        try:
            serve.start(http_options={"port": port})
            results = {}
            for routing in ROUTINGS:
                results[routing] = measure(args_of(folder, modules, routing), requests, rate, port)
                print(routing, json.dumps(results[routing]), flush=True)
        finally:
            serve.shutdown()
            ray.shutdown()
    for result in results.values():
        result["times_random"] = round(result["found_in_slot"] / results["random"]["found_in_slot"], 2)
    table = Table("routing", *results["random"])
    for routing, result in results.items():
        table.add_row(routing, *map(str, result.values()))
    console.print(table)
    if out:
        facts = {
            "benchmark": "fleet",
            "date": time.strftime("%Y-%m-%d"),
            "machine": {**machine("cpu"), "ray": version("ray")},
        }
        world = {
            "adapters": ADAPTERS,
            "slots": SLOTS,
            "replicas": REPLICAS,
            "requests": requests,
            "rate": rate,
        }
        out.write_text(json.dumps({**facts, **world, "routing": results}, indent=1) + "\n")


def write_world(folder: Path) -> list[str]:
    """A model without weights, and adapters for it as `NAME=PATH`."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = [f"adapter-{number:02}" for number in range(ADAPTERS)]
    for seed, name in enumerate(names):
        save_random_adapter(folder / name, str(folder), 4, seed, torch.float32)
    return [f"{name}={folder / name}" for name in names]


def args_of(model: str, modules: list[str], routing: str) -> FleetArgs:
    return FleetArgs(
        model=model,
        served_model_name="tiny",
        lora_modules=modules,
        engine=ENGINE_OPTIONS,
        routing=routing,
    )


def measure(args: FleetArgs, requests: int, rate: float, port: int) -> dict[str, Any]:
    """Serve it, ask, and take it down again."""
    serve.run(application(args, [LLMEngine.get_metrics]), name=APP)
    try:
        chooser = random.Random(0)
        names = [module.partition("=")[0] for module in args.lora_modules]
        zipf = [1 / rank for rank in range(1, len(names) + 1)]
        asyncio.run(ask(chooser.choices(names, zipf, k=requests // 10), rate, port))
        before = engines()
        seconds = asyncio.run(ask(chooser.choices(names, zipf, k=requests), rate, port))
        after = engines()
    finally:
        serve.delete(APP)
    copies = sum(each["activations"] for each in after) - sum(each["activations"] for each in before)
    p99 = quantiles(seconds, n=100, method="inclusive")[98]
    return {
        "found_in_slot": round(1 - copies / requests, 3),
        "ms_p50": round(1000 * median(seconds), 1),
        "ms_p99": round(1000 * p99, 1),
    }


def engines() -> list[dict[str, Any]]:
    """What every engine counted of its adapters."""
    handle = serve.get_deployment_handle(ENGINE, APP)
    metrics = handle.broadcast("ask", "call", LLMEngine.get_metrics).results()
    return [each["lora"] for each in metrics]


async def ask(names: list[str], rate: float, port: int) -> list[float]:
    """One request for each name, at times as a Poisson process has them; seconds that each took."""
    gaps = random.Random(1)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(ask_one(client, name)))
            await asyncio.sleep(gaps.expovariate(rate))
        return await asyncio.gather(*tasks)


async def ask_one(client: httpx.AsyncClient, name: str) -> float:
    started = time.perf_counter()
    body = {"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
