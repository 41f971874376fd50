"""`minivllm simulate`: one traffic under several policies. Stands for nothing in vLLM (v0.22.1)."""

import runpy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.progress import Progress
from rich.table import Table

from minivllm.commands.common import console, print_json
from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.policies import keeping, prefetching, routing, scheduling
from minivllm.simulate import traffic as made
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.fleet import Fleet, adapters_of_ranks
from minivllm.simulate.page import build_page
from minivllm.simulate.replica_config import Elastic, ReplicaConfig
from minivllm.simulate.report import report

# A page of eight ranks by a KV block of 16 tokens, in the Llama-8B shape.
BLOCKS_A_PAGE = 20

# Option -> the policies that it can name.
POLICIES: dict[str, Mapping[str, Any]] = {
    "eviction_policy": keeping.POLICIES,
    "scheduling_policy": scheduling.POLICIES,
    "prefetch": prefetching.POLICIES,
    "routing": routing.POLICIES,
}

COLUMNS = {
    "tok/s": ("tokens_per_second", "{:.0f}"),
    "TTFT": ("ttft_p50_ms", "{:.0f}"),
    "p99": ("ttft_p99_ms", "{:.0f}"),
    "TPOT": ("tpot_p50_ms", "{:.1f}"),
    "p99 ": ("tpot_p99_ms", "{:.0f}"),
    "hits": ("memory_hits", "{:.0%}"),
    "bound": ("memory_hits_bound", "{:.0%}"),
    "copies": ("copies", "{:.0f}"),
    "Jain": ("jain", "{:.3f}"),
    "$/M": ("usd_per_million_tokens", "{:.2f}"),
}


@dataclass(frozen=True)
class Case:
    """One combination of policies, by the names of the options."""

    names: dict[str, str]

    def title(self, varied: list[str]) -> str:
        """What tells it from the others."""
        return ", ".join(self.names[option] for option in varied) or ", ".join(self.names.values())


def run_simulate(given: dict[str, Any], page: Path | None, as_json: bool) -> None:
    """Simulate and print.   given: the command's options by name. ValueError for what cannot be."""
    for path in given.pop("policy_file") or []:
        runpy.run_path(str(path))
    cases = cases_of(given)
    arrivals = arrivals_of(given)
    rows = []
    with Progress(console=console, transient=True, disable=as_json) as bar:
        task = bar.add_task("simulating", total=len(cases) * len(arrivals))
        for number, case in enumerate(cases):
            fleet = make_fleet(given, case)
            fleet.serve(arrivals, lambda done, n=number: bar.update(task, completed=n * len(arrivals) + done))
            rows.append({**case.names, **report(fleet, given["price"])})
    options = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    result = {"options": options, "cost_model": cost_of(given).source, "rows": rows}
    varied = [option for option in POLICIES if len({case.names[option] for case in cases}) > 1]
    titles = [case.title(varied) for case in cases]
    if page is not None:
        page.write_text(build_page(result, titles, COLUMNS), encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        show(result, titles)


def cases_of(given: dict[str, Any]) -> list[Case]:
    """Every combination of the policies that the options name. ValueError for an unknown one."""
    names = {option: [name.strip() for name in given[option].split(",")] for option in POLICIES}
    for option, several in names.items():
        for name in several:
            if name not in POLICIES[option]:
                flag, known = option.replace("_", "-"), ", ".join(POLICIES[option])
                raise ValueError(f"there is no policy '{name}' for --{flag}; known are {known}")
    return [Case(dict(zip(names, combination))) for combination in product(*names.values())]


def arrivals_of(given: dict[str, Any]) -> list[made.Arrival]:
    """The traffic that the options describe. ValueError for an unknown kind."""
    check("times", given["times"], ["trace", *made.TIMES])
    check("adapter-mix", given["adapter_mix"], list(made.ADAPTERS))
    seed, rate = given["seed"], given["rate"]
    arrivals = made.repeated(made.read_trace(given["trace"]), given["requests"], rate)
    if given["times"] != "trace":
        arrivals = made.with_times(arrivals, given["times"], rate, seed)
    if given["adapters"]:
        arrivals = made.with_adapters(
            arrivals, given["adapter_mix"], given["adapters"], given["alpha"], seed + 1
        )
    return made.with_sessions(arrivals, given["turns"], seed=seed + 2) if given["turns"] > 1 else arrivals


def check(option: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ValueError(f"there is no '{name}' for --{option}; known are {', '.join(known)}")


def make_fleet(given: dict[str, Any], case: Case) -> Fleet:
    """Engines and router, with nothing in them yet."""
    cost = cost_of(given)
    if given["disk"] is not None:
        cost = replace(cost, read_bytes_per_s=given["disk"] * 1e9)
    ranks = ranks_of(given["ranks"])
    config = ReplicaConfig(
        SchedulerConfig(given["max_num_seqs"], given["max_num_batched_tokens"], given["max_lora_wait_steps"]),
        CacheConfig(num_blocks=given["kv_blocks"]),
        LoRAConfig(max(ranks), given["max_loras"], given["max_cpu_loras"]).on_device("cuda"),
        elastic=Elastic(given["pages"], BLOCKS_A_PAGE) if given["max_loras"] is None else None,
        keeping=keeping.POLICIES[case.names["eviction_policy"]],
        scheduling=scheduling.POLICIES[case.names["scheduling_policy"]],
        prefetching=prefetching.POLICIES[case.names["prefetch"]],
    )
    sizes = adapters_of_ranks([ranks[n % len(ranks)] for n in range(given["adapters"])], cost.bytes_per_rank)
    route = routing.POLICIES[case.names["routing"]](given["seed"])
    return Fleet(config, cost, sizes, route, given["replicas"])


def ranks_of(text: str) -> list[int]:
    """ValueError for what are no whole numbers with commas between."""
    try:
        return [int(rank) for rank in text.split(",")]
    except ValueError:
        raise ValueError(f"--ranks '{text}' is not of the form 8,16,64") from None


def cost_of(given: dict[str, Any]) -> CostModel:
    """What the options name, or what the package brings."""
    return load_cost(given["cost"] or "h100-llama-8b")


def load_cost(name: str) -> CostModel:
    """A file, or a cost model that the package brings. FileNotFoundError names what is not there."""
    costs = files("minivllm.simulate") / "costs"
    brought = costs / f"{name}.json"
    if not brought.is_file() and not Path(name).is_file():
        known = ", ".join(sorted(each.name.removesuffix(".json") for each in costs.iterdir()))
        raise FileNotFoundError(
            f"there is no cost model '{name}'; give a file of `python -m benchmarks.fit`, or {known}"
        )
    return CostModel.load(Path(str(brought)) if brought.is_file() else Path(name))


def show(result: dict[str, Any], titles: list[str]) -> None:
    console.print(f"cost of a step: {result['cost_model']}", highlight=False)
    said = (
        "medians and 99th percentiles, in ms, until the first token (TTFT) and of each further one (TPOT); "
        "docs/simulate.md explains the other columns"
    )
    table = Table("", caption=said, box=SIMPLE, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for title, row in zip(titles, result["rows"]):
        table.add_row(title, *(form.format(row[name]) for name, form in COLUMNS.values()))
    console.print(table)
