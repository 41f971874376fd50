"""`python -m benchmarks.policies`: all policies on all traffics, in the simulator. See docs/simulate.md.

One engine that is short of slots, memory and disk serves every traffic under every combination of who stays and who
goes first, and under every rule of what is read ahead. Four engines serve every traffic under every routing.
"""

import datetime
import inspect
import json
from argparse import ArgumentParser
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.arguments import run_as_command, whole
from benchmarks.report import machine
from minivllm.commands.simulate import Case, arrivals_of, cost_of, make_fleet
from minivllm.commands.simulate_cli import simulate
from minivllm.policies import keeping, prefetching, routing, scheduling
from minivllm.simulate.report import report

NAME = "python -m benchmarks.policies"
# What tells a traffic from Poisson arrivals with the lengths of azure-2023-conv and adapters by Zipf.
TRAFFICS: dict[str, dict[str, Any]] = {
    "Poisson": {},
    "bursts": {"times": "bursts"},
    "diurnal": {"times": "diurnal"},
    "sessions": {"turns": 3.0, "rate": 3.0},
    "Azure conv": {"times": "trace"},
    "Azure code": {"times": "trace", "trace": "azure-2023-code"},
    "hot adapters": {"adapter_mix": "bursts"},
    "tenants": {"adapter_mix": "tenants"},
}
ENGINE = {
    "disk": 0.8,
    "adapters": 400,
    "ranks": "8,16,32,64",
    "max_loras": 32,
    "max_cpu_loras": 64,
    "rate": 6.0,
}
FLEET = ENGINE | {"replicas": 4}
DEFAULTS = {
    "eviction_policy": "lru",
    "prefetch": "none",
    "scheduling_policy": "fcfs",
    "routing": "least-loaded",
}
KEPT = (
    "tokens_per_second",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p99_ms",
    "memory_hits",
    "reads",
    "copies",
    "jain",
)


def options(**changes: Any) -> dict[str, Any]:
    """The simulator's, by name."""
    found = {name: parameter.default for name, parameter in inspect.signature(simulate).parameters.items()}
    return found | changes


def cases() -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    """Traffic, options, and names of policies, of every run."""
    usual = [[name] for name in DEFAULTS.values()]
    one = [*product(keeping.POLICIES, usual[1], scheduling.POLICIES, usual[3])]
    one += product(usual[0], [name for name in prefetching.POLICIES if name != "none"], *usual[2:])
    runs = [(ENGINE, names) for names in one] + [
        (FLEET, names) for names in product(*usual[:3], routing.POLICIES)
    ]
    return [
        (traffic, base | TRAFFICS[traffic], dict(zip(DEFAULTS, names)))
        for traffic in TRAFFICS
        for base, names in runs
    ]


def run(traffic: str, changes: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """One simulation."""
    replicas = changes.get("replicas", 1)
    given = options(**{**changes, "rate": changes["rate"] * replicas})
    given["requests"] *= replicas
    fleet = make_fleet(given, Case(names))
    fleet.serve(arrivals_of(given))
    said = report(fleet)
    return {
        "traffic": traffic,
        "replicas": replicas,
        **names,
        **{name: round(said[name], 4) for name in KEPT},
    }


def table(rows: list[dict[str, Any]], replicas: int, option: str, number: str) -> str:
    """Policies by traffics, all others being the defaults: one number, in Markdown."""
    chosen = [
        row
        for row in rows
        if row["replicas"] == replicas
        and all(row[name] == default for name, default in DEFAULTS.items() if name != option)
    ]
    lines = [f"| `{option}` | {' | '.join(TRAFFICS)} |", "|---|" + "---|" * len(TRAFFICS)]
    for policy in dict.fromkeys(row[option] for row in chosen):
        of = {row["traffic"]: row[number] for row in chosen if row[option] == policy}
        lines.append(f"| {policy} | {' | '.join(f'{of[traffic]:,.0f}' for traffic in TRAFFICS)} |")
    return "\n".join(lines)


def best(rows: list[dict[str, Any]], number: str) -> str:
    """For each traffic the combination with the least, and what the defaults have: one engine."""
    lines = [f"| {number} | best of all | defaults | by |", "|---|---|---|---|"]
    for traffic in TRAFFICS:
        of = [row for row in rows if row["traffic"] == traffic and row["replicas"] == 1]
        least = min(of, key=lambda row: row[number])
        (usual,) = (row for row in of if all(row[name] == default for name, default in DEFAULTS.items()))
        by = ", ".join(least[name] for name in ("eviction_policy", "prefetch", "scheduling_policy"))
        lines.append(f"| {traffic} | {least[number]:,.0f} | {usual[number]:,.0f} | {by} |")
    return "\n".join(lines)


def show(rows: list[dict[str, Any]]) -> None:
    """Tables in Markdown."""
    for option in ("eviction_policy", "prefetch", "scheduling_policy"):
        for number in ("ttft_p50_ms", "ttft_p99_ms"):
            print(f"\n{number}, one engine\n\n{table(rows, 1, option, number)}")
    for number in ("ttft_p50_ms", "ttft_p99_ms"):
        print(f"\n{number}, four engines\n\n{table(rows, FLEET['replicas'], 'routing', number)}")
    print(f"\n{best(rows, 'ttft_p99_ms')}")


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--requests", type=whole(), default=1000, help="for each engine")
    parser.add_argument("--workers", type=whole(), default=2)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--json", type=Path, required=True, help="result file")
    asked = parser.parse_args(arguments)
    common = {"requests": asked.requests, "seed": asked.seed}
    runs = [(traffic, changes | common, names) for traffic, changes, names in cases()]
    with ProcessPoolExecutor(asked.workers) as pool:
        rows = list(pool.map(run, *zip(*runs), chunksize=4))
    result = {
        "benchmark": "policies",
        "date": str(datetime.date.today()),
        "machine": machine("cpu"),
        "cost_model": cost_of(options(**ENGINE)).source,
        "options": common | {"engine": ENGINE, "traffics": TRAFFICS},
        "rows": rows,
    }
    asked.json.write_text(json.dumps(result, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    show(rows)


if __name__ == "__main__":
    run_as_command(NAME, main)
