"""`minivllm simulate`: its options, without PyTorch. What it does is in `minivllm.commands.simulate`."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
# Slots, pages and blocks take memory here, too.
MOST = 1_000_000
Names = "one, or several with commas between: all combinations are compared"


def simulate(
    requests: Annotated[int, typer.Option(min=1, max=MOST, help="How many.")] = 2000,
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests a second, on average.")] = 8.0,
    trace: Annotated[
        str, typer.Option(help="Lengths: azure-2023-conv or azure-2023-code.")
    ] = "azure-2023-conv",
    times: Annotated[str, typer.Option(help="When: trace, poisson, bursts or diurnal.")] = "poisson",
    adapters: Annotated[int, typer.Option(min=0, max=MOST, help="How many; 0 = the base model alone.")] = 100,
    adapter_mix: Annotated[
        str, typer.Option(help="Whose: zipf, bursts, tenants, hotspot, thrash or long-tail.")
    ] = "zipf",
    alpha: Annotated[float, typer.Option(min=0, help="Of Zipf's law; 0 = all alike.")] = 1.0,
    ranks: Annotated[str, typer.Option(help="Adapters' ranks in turn, with commas between.")] = "16",
    turns: Annotated[
        float, typer.Option(min=1, max=MOST, help="Of a session, whose context grows; 1 = no sessions.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same report.")] = 0,
    replicas: Annotated[int, typer.Option(min=1, max=1_000, help="Engines behind a router.")] = 1,
    max_loras: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Slots of an engine; as many as it has pages for if not given."),
    ] = None,
    pages: Annotated[
        int, typer.Option(min=8, max=MOST, help="For adapters alone; 20 KV blocks make one more.")
    ] = 64,
    max_cpu_loras: Annotated[int | None, typer.Option(help="Adapters in memory; as many as slots.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests running at once.")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens a step.")] = 8192,
    max_lora_wait_steps: Annotated[
        int, typer.Option(min=1, help="Steps until a waiting adapter is due.")
    ] = 96,
    kv_blocks: Annotated[int, typer.Option(min=2, max=MOST, help="Of 16 tokens each, an engine.")] = 24_000,
    eviction_policy: Annotated[str, typer.Option(help=f"lru, lfu, gdsf; {Names}.")] = "lru",
    scheduling_policy: Annotated[
        str, typer.Option(help=f"fcfs, adapter-affine, rank-aware, shortest-first, fair; {Names}.")
    ] = "fcfs",
    prefetch: Annotated[str, typer.Option(help=f"none, arrival, queue, session; {Names}.")] = "none",
    routing: Annotated[
        str, typer.Option(help=f"random, least-loaded, hashing, bounded-hashing, affine; {Names}.")
    ] = "least-loaded",
    policy_file: Annotated[
        list[Path] | None,
        typer.Option(dir_okay=False, help="A Python file that adds policies; may be repeated."),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            help="A file of `benchmarks.fit`; h100-llama-8b (-slots with --max-loras) if not given."
        ),
    ] = None,
    disk: Annotated[
        float | None, typer.Option(min=1e-3, help="GB a second from disk; else what the cost model says.")
    ] = None,
    price: Annotated[float, typer.Option(min=0, max=MOST, help="US dollars an hour and engine.")] = 2.5,
    page: Annotated[Path | None, typer.Option(help="Write a page that compares them.")] = None,
    as_json: Json = False,
) -> None:
    """The engine's scheduler and caches on a virtual clock: compare all combinations of the policies given."""
    given = {name: value for name, value in locals().items() if name not in ("page", "as_json")}
    from minivllm.commands.simulate import run_simulate

    run_simulate(given, page, as_json)
