"""`python -m benchmarks.trust record|judge`: does the simulator say what the engine does? See README.md.

`record` serves the demo model under Poisson traffic in real time, and keeps the arrivals and the work of each step.
`judge` fits a cost model to one record, and lets the simulator serve the arrivals of another one.
"""

import datetime
import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapters import write_adapters
from benchmarks.arguments import number, one_of, run_as_command, whole
from benchmarks.fit import NOT_HELD, Said, fit, kernel_seconds, late_steps, read, waits_for_kernels
from benchmarks.fit_reads import fit_reads
from benchmarks.measure import Step, run_step
from benchmarks.report import machine
from benchmarks.serve import add, serve_summary, warm_up
from minivllm.assembly import LLMEngine
from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.engine_args import EngineArgs
from minivllm.lora.events import LoRAEvent
from minivllm.lora.request import LoRARequest
from minivllm.models.demo_model import demo_model_path
from minivllm.policies.routing import least_loaded
from minivllm.simulate.cost_model import CostModel, Held, StepWork, work_of
from minivllm.simulate.fleet import Fleet, adapters_of_ranks
from minivllm.simulate.records import arrivals_of, put_in_place, replica_config, sizes_of
from minivllm.simulate.replica import ReplicaConfig
from minivllm.simulate.report import report
from minivllm.simulate.traffic import Arrival, Lengths, make_traffic

NAME = "python -m benchmarks.trust"
ADAPTERS, RANK = 8, 16
ENGINE = {"max_loras": 4, "max_cpu_loras": 8, "max_num_seqs": 16, "max_num_batched_tokens": 512}
KV_BLOCKS = 1025
PROMPT, OUTPUT = Lengths(64, 0.6, 16, 256), Lengths(32, 0.6, 4, 128)
JUDGED = ("tokens_per_second", "ttft_p50_ms", "ttft_p99_ms")
MOVED_S = 0.0005  # of arrivals


class Clock:
    """Seconds: of a clock on the wall or, where neighbours have the cores, those that this process computes.

    Then nobody waits: what a `sleep` would take is added.
    """

    def __init__(self, kind: str) -> None:
        self.read = time.perf_counter if kind == "wall" else time.process_time
        self.skipped = 0.0

    def __call__(self) -> float:
        return self.read() + self.skipped

    def sleep(self, seconds: float) -> None:
        if self.read is time.perf_counter:
            time.sleep(max(0.0, seconds))
        else:
            self.skipped += max(0.0, seconds)


class Recorded:
    """Listens to an engine's steps and adapters: the work of each step, and the copies in it."""

    def __init__(self, engine: LLMEngine) -> None:
        self.ranks = dict.fromkeys(range(1, ADAPTERS + 1), RANK)
        self.rows: list[dict[str, object]] = []
        self.copies = 0
        self.work: list[float] | None = None
        engine.listeners.append(self.step_launched)
        engine.adapters.manager.listeners.append(self.heard)

    def step_launched(self, output: object) -> None:
        self.work = [round(each, 3) for each in work_of(output, self.ranks)]

    def heard(self, event: LoRAEvent) -> None:
        if event.kind == "activate":
            self.copies += 1

    def step_ended(self, seconds: float) -> None:
        self.rows.append({"work": self.work, "seconds": round(seconds, 6), "copies": self.copies})
        self.work, self.copies = None, 0


def serve(
    engine: LLMEngine, traffic: list[Arrival], adapters: list[LoRARequest], clock: Clock
) -> dict[str, object]:
    """As `benchmarks.serve.serve`; a step's seconds are those since the one before, with the requests it took in."""
    recorded, pending, steps = Recorded(engine), deque(enumerate(traffic)), []
    start = started = clock()
    while pending or engine.has_unfinished_requests():
        while pending and pending[0][1].time_s <= clock() - start:
            place, arrival = pending.popleft()
            add(engine, str(place), arrival, adapters)
        if engine.has_unfinished_requests():
            emitted = run_step(engine).emitted
            steps.append(Step(started, clock(), emitted))
            recorded.step_ended(steps[-1].seconds)
            started = steps[-1].ended
        else:
            clock.sleep(start + pending[0][1].time_s - clock())
            started = clock()
    return {"summary": serve_summary(start, steps, traffic), "steps": recorded.rows}


def record(options: Namespace) -> None:
    """Serve one traffic, write what happened."""
    traffic = make_traffic(
        options.num_requests, options.rate, ADAPTERS, options.alpha, PROMPT, OUTPUT, options.seed
    )
    model = str(demo_model_path())
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(Path(folder), model, ADAPTERS, RANK)
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model,
                skip_tokenizer_init=True,
                device="cpu",
                enable_lora=True,
                max_lora_rank=RANK,
                max_model_len=512,
                num_kv_blocks=KV_BLOCKS,
                enable_prefix_caching=False,
                threads=options.threads,
                **ENGINE,
            )
        )
        warm_up(engine, traffic, adapters)
        for adapter in adapters:
            engine.add_lora(adapter)
        found = serve(engine, traffic, adapters, Clock(options.clock))
    told = {
        "date": str(datetime.date.today()),
        "machine": machine("cpu") | {"threads": options.threads, "clock": options.clock},
        "rate": options.rate,
        "seed": options.seed,
    }
    arrivals = [asdict(arrival) for arrival in traffic]
    report = {
        "benchmark": "trust",
        "date": str(datetime.date.today()),
        **told,
        "engine": ENGINE,
        "arrivals": arrivals,
        **found,
    }
    options.out.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in found["summary"].items() if "quantiles" not in k}, indent=1))


def compare(fitted: Sequence[Path], judged: Path, case: str = "lora") -> dict[str, tuple[float, float]]:
    """Fit to some records, simulate the arrivals of another: name -> what was measured, and what was simulated.

    case   of the rows of `benchmarks.engine serve`; where there is one only, it is that one
    """
    result, cost = json.loads(judged.read_text(encoding="utf-8")), fit(fitted)
    simulated = simulate(result, cost, case)
    return {name: (measured_in(result, case)[name], simulated[name]) for name in JUDGED}


def spread(
    fitted: Sequence[Path], judged: Path, times: int, case: str = "lora"
) -> dict[str, tuple[float, float, float]]:
    """As `compare`, `times` over: name -> 5th, 50th and 95th percentile.

    Arrivals move by up to half a millisecond. No record says who came a moment before a step, and who after. And steps
    take what they took where they were fitted, not their mean.
    """
    result, cost = json.loads(judged.read_text(encoding="utf-8")), fit(fitted)
    said = [read(path)[0] for path in fitted]
    runs = []
    for seed in range(times):
        rng = np.random.default_rng(seed)
        runs.append(simulate(result, scattered(cost, said, rng), case, rng))
    return {name: tuple(np.percentile([run[name] for run in runs], (5, 50, 95)).tolist()) for name in JUDGED}


def scattered(cost: CostModel, said: Sequence[Said], rng: np.random.Generator) -> CostModel:
    """A model fitted to these. Steps, what the host does before them, and reads take longer as often as these did."""
    measured = [one for each in said for one in each.steps]
    reads = np.array([share for each in said for one in each.reads for share in fit_reads(one, cost).shares])
    plain = [one for one in measured if one.before is None and one.held == NOT_HELD]
    shares = [
        np.array([one.seconds / cost.step_seconds(one.work) for one in plain if one.work.lora == lora])
        for lora in (0, 1)
    ]
    # What the host did while a step ran took as long as that step at most: nobody waits for more.
    hosts = np.array(
        [
            (one.seconds - cost.launch_s) / (cost.host_seconds(one.held) * one.held.stretch)
            for one in late_steps(measured)
            if cost.host_seconds(one.held)
        ]
    )
    waits = [one for one in measured if waits_for_kernels(one) and one.work.lora]
    kernels = np.array([kernel_seconds(one, cost) for one in waits])

    class Scattered(CostModel):
        def step_seconds(self, work: StepWork) -> float:
            of_kind = shares[int(work.lora)]
            is_known = len(of_kind) and work.tokens <= self.graph_tokens
            return super().step_seconds(work) * (drawn(of_kind) if is_known else 1.0)

        def launch_seconds(self, work: StepWork) -> float:
            seconds = super().launch_seconds(work)
            return drawn(kernels) if seconds and work.lora else seconds

        def host_seconds(self, held: Held) -> float:
            seconds = super().host_seconds(held)
            return seconds * drawn(hosts) if seconds else 0.0

        def unpack_seconds(self, num_bytes: float) -> float:
            return super().unpack_seconds(num_bytes) * (drawn(reads) if len(reads) else 1.0)

    def drawn(values: np.ndarray) -> float:
        return float(values[rng.integers(len(values))])

    return Scattered(**vars(cost))


def measured_in(result: dict[str, Any], case: str) -> dict[str, Any]:
    if result["benchmark"] == "trust":
        return result["summary"]
    rows = result["rows"]
    (row,) = rows if len(rows) == 1 else [row for row in rows if row["case"] == case]
    return row


def simulate(
    result: dict[str, Any], cost: CostModel, case: str, rng: np.random.Generator | None = None
) -> dict[str, float]:
    """The report on a record's arrivals, each moved a little if there is an `rng`."""
    measured = measured_in(result, case)
    if result["benchmark"] == "trust":
        fleet, arrivals = demo_fleet(result, cost), [Arrival(**arrival) for arrival in result["arrivals"]]
    else:
        config, arrivals = replica_config(result, measured), arrivals_of(measured)
        fleet = Fleet(config, cost, sizes_of(measured, cost.bytes_per_rank), least_loaded)
        put_in_place(fleet.replicas[0], measured)
    if rng is not None:
        arrivals = [
            replace(one, time_s=max(0.0, one.time_s + rng.uniform(-MOVED_S, MOVED_S))) for one in arrivals
        ]
    fleet.serve(sorted(arrivals, key=lambda one: one.time_s))
    return report(fleet)


def demo_fleet(result: dict[str, Any], cost: CostModel) -> Fleet:
    """The engine of `record`, all of whose adapters are in memory."""
    engine = result["engine"]
    config = ReplicaConfig(
        SchedulerConfig(engine["max_num_seqs"], engine["max_num_batched_tokens"]),
        CacheConfig(num_blocks=KV_BLOCKS, enable_prefix_caching=False),
        LoRAConfig(max_lora_rank=RANK, max_loras=engine["max_loras"], max_cpu_loras=engine["max_cpu_loras"]),
        concurrent_reads=False,
    )
    cost = replace(cost, read_bytes_per_s=float("inf"))
    return Fleet(config, cost, adapters_of_ranks([RANK] * ADAPTERS, 1.0), least_loaded)


def judge(options: Namespace) -> None:
    """Print both sides, and how far they say anything."""
    between = spread(options.fitted, options.record, options.times, options.case) if options.times else {}
    for name, (measured, simulated) in compare(options.fitted, options.record, options.case).items():
        print(f"{name}: measured {measured:.1f}, simulated {simulated:.1f} ({simulated / measured - 1:+.1%})")
        if between:
            least, middle, most = between[name]
            print(
                f"  {least:.1f} to {most:.1f}, median {middle:.1f} ({middle / measured - 1:+.1%}), where steps scatter"
            )


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog=NAME, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--rate", type=number(above=True), required=True, help="requests a second")
    recording.add_argument("--num-requests", type=whole(), default=300)
    recording.add_argument("--alpha", type=number(), default=1.0, help="of the adapters' Zipf popularity")
    recording.add_argument("--threads", type=whole(), default=2)
    recording.add_argument("--clock", type=one_of(("wall", "cpu")), default="wall", help="cpu: of one thread")
    recording.add_argument("--seed", type=whole(0), default=0)
    recording.add_argument("--out", type=Path, required=True)
    judging = commands.add_parser("judge")
    judging.add_argument(
        "record", type=Path, help="of `record`, or of benchmarks.engine serve: to compare with"
    )
    judging.add_argument("--case", type=one_of(("base", "lora")), default="lora", help="of several rows")
    judging.add_argument(
        "--times", type=whole(0), default=0, help="simulations more: arrivals moved a little, steps scatter"
    )
    judging.add_argument("fitted", type=Path, nargs="+", help="the records to fit to, of another rate, say")
    options = parser.parse_args(arguments)
    (record if options.command == "record" else judge)(options)


if __name__ == "__main__":
    run_as_command(NAME, main)
