"""`python -m benchmarks.fit RESULT...`: a cost model for the simulator, from files of results and records of traffic.

What a step, a copy and a read cost is found by least squares, none of it negative.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arguments import number, run_as_command
from benchmarks.fit_reads import ReadTraffic, costs, fit_reads, reads_of
from minivllm.gpu.cuda_graphs import MOST_TOKENS, smallest_that_holds
from minivllm.simulate.cost_model import CostModel, Held, StepWork, graph_size, graph_sizes
from minivllm.simulate.records import Call, calls_of

NAME = "python -m benchmarks.fit"
ROUNDS = 5
NOT_HELD = Held()


class Measured(NamedTuple):
    """Work, copies into slots, and the seconds that both took.

    copies   that the step waited for; on a GPU those that ran concurrently with it
    before   a step that was computed in the same seconds
    held     why the device may have had nothing to do in some of them
    """

    work: StepWork
    copies: int
    seconds: float
    before: StepWork | None = None
    held: Held = NOT_HELD

    @property
    def steps(self) -> list[StepWork]:
        return [self.work] if self.before is None else [self.before, self.work]


class Found(NamedTuple):
    """What a fit found, by the names of `CostModel`."""

    step: dict[str, float]
    copy_s: float
    prompts: list[list[float]]
    lora_prompts: list[list[float]]


# Up to so many tokens, and from there to so many, what a device takes for steps that are no graphs lies on a line.
WITHOUT_GRAPH = (4 * MOST_TOKENS, 8 * MOST_TOKENS)

# Of a step that is no graph, and has no more tokens, the host launches the kernels for longer than they take.
HOST_IS_SLOWER = 2 * MOST_TOKENS

# Tokens of the graphs of engines that did not note them.
GRAPHS_OF_BEFORE = [*range(32, 256, 32), *range(256, 512, 64), *range(512, 1025, 128)]

# Where a step waits for copies. All adapters of such a result are alike: none takes longer for its bytes.
STEPS_WAIT_FOR_COPIES = {"copy_bytes_per_s": float("inf"), "concurrent_copies": False}

# Where prompts have curves: how many tokens there are says no more.
ON_CURVES = {"tokens", "prompt_steps", "lora_tokens"}


def fit_steps(
    measured: Sequence[Measured], assumed: Mapping[str, float] | None = None, with_curves: bool = False
) -> Found:
    """What a step costs by each kind of work, and what a copy that it waits for costs.

    Squares are of the errors' shares of the seconds that the fit says. Shares of those measured would let it say less
    than the mean. Hence it is made again by what it said before.

    assumed       field of `StepWork` -> seconds for each, which are not looked for
    with_curves   steps with prompts take as long as graphs of their sizes do, which no line goes through

    ValueError for nothing to fit to.
    """
    if not measured:
        raise ValueError(
            "there is no step to fit to; give a result of `benchmarks.engine decode` or a record"
        )
    given = CostModel(dict(assumed or {}))
    seconds = np.array([one.seconds for one in measured])
    rest = seconds - [sum(map(given.step_seconds, one.steps)) for one in measured]
    curves = [knots(measured, lora) if with_curves else [] for lora in (False, True)]
    x = np.array([columns(one, curves) for one in measured])
    left_out = given.step.keys() | (ON_CURVES if with_curves else set())
    x[:, [place for place, name in enumerate(StepWork._fields) if name in left_out]] = 0
    said = seconds
    for _ in range(ROUNDS):
        found = costs(x / said[:, None], rest / said)
        said = x @ found + seconds - rest
    names, base = StepWork._fields, len(StepWork._fields) + 1
    step = {name: each for name, each in zip(names, found.tolist()) if each} | given.step
    points = found[base:].tolist()
    prompts, lora_prompts = ([[k, points.pop(0)] for k in curve] for curve in curves)
    return Found(step, float(found[base - 1]), prompts, lora_prompts)


def knots(measured: Sequence[Measured], lora: bool) -> list[float]:
    """Of the curve of steps with prompts, with adapters or without: sizes of graphs, and ends of lines beyond."""
    steps = [step for one in measured for step in one.steps if step.prompt_steps and bool(step.lora) == lora]
    sizes = {graph_size(step.tokens / step.prompt_steps) for step in steps}
    graphs = {size for size in sizes if size <= MOST_TOKENS}
    largest = max(sizes, default=0)
    ends = [end for begin, end in zip((MOST_TOKENS, *WITHOUT_GRAPH), WITHOUT_GRAPH) if largest > begin]
    return sorted(graphs) + ends


def columns(one: Measured, curves: Sequence[Sequence[float]]) -> list[float]:
    """A row to fit: work, copies, and how much of each knot of the curves is in it."""
    row = [sum(each) for each in zip(*one.steps)] + [float(one.copies)]
    for lora, curve in enumerate(curves):
        shares = np.zeros(len(curve))
        for step in one.steps:
            if step.prompt_steps and curve and bool(step.lora) == bool(lora):
                size = graph_size(step.tokens / step.prompt_steps)
                shares += step.prompt_steps * np.array(
                    [np.interp(size, curve, unit) for unit in np.eye(len(curve))]
                )
        row += shares.tolist()
    return row


def steps_of_decode(result: dict[str, Any]) -> list[Measured]:
    """Of `benchmarks.engine decode`: a step in which all requests decode, and the one that holds nothing but prompts.

    That is the first one, which is full if there are more prompts: the next step has rows of those that it ended.
    """
    options, measured = result["options"], []
    prompt, rank = options["prompt_tokens"], options["rank"]
    for row in result["rows"]:
        requests = row["requests"]
        used = 0 if row["case"] in ("base", "none") else min(int(row["case"]), requests)
        decode = _step(requests, 1, prompt + options["output_tokens"] / 2, used, rank)
        measured.append(Measured(decode, 0, row["step_ms"] / 1e3))
        first = min(requests, options["max_num_batched_tokens"] / prompt)
        measured.append(Measured(_step(first, prompt, prompt, used, rank), 0, row["prompt_steps_ms"] / 1e3))
    return measured


def _step(requests: float, tokens: int, context: float, adapters: int, rank: int) -> StepWork:
    """A step of as many rows, which compute `tokens` each."""
    return StepWork(
        steps=1,
        prompt_steps=float(tokens > 1),
        requests=requests,
        tokens=requests * tokens,
        context=requests * context,
        pairs=requests * tokens * (context - (tokens - 1) / 2) / 1000,
        lora=float(adapters > 0),
        adapters=adapters,
        lora_tokens=requests * tokens * (adapters > 0),
        ranks=adapters * rank,
        admitted=requests * (tokens > 1),
    )


def steps_of_record(result: dict[str, Any]) -> list[Measured]:
    """Of `benchmarks.trust record`: every step."""
    return [Measured(StepWork(*row["work"]), row["copies"], row["seconds"]) for row in result["steps"]]


def steps_of_serve(row: dict[str, Any], held: Sequence[Held] = ()) -> list[Measured]:
    """Of `benchmarks.engine serve`: steps that the device began as soon as the one before was through.

    A call that ran ahead returns when the step before its own is through. Such a step took from there to the end of
    the next call. One that is no graph is launched when the step before is through: from the end of the call before,
    both were computed until its own call's end. It is the next one's if that call ran ahead, and the device was slower.
    Steps in graphs of sizes that an engine no longer has are left out.

    Where no call ran ahead, on a CPU, a step takes its call, and waits for copies.

    held   of each call, if adapters were read
    """
    measured, calls = [], list(calls_of(row))
    if not any(call.ahead for call in calls):
        return [Measured(c.work, c.copies, c.ended_s - c.started_s) for c in calls if c.work is not None]
    sizes = row["engine"].get("graph_sizes", GRAPHS_OF_BEFORE)
    held = held or [NOT_HELD] * len(calls)
    for place, (one, call, following) in enumerate(zip([None, *calls], calls, [*calls[1:], None])):
        if call.work is None or one is None or one.work is None or not one.ahead:
            continue  # nothing was there to wait for
        if any(each.work.prompt_steps and graph_is_gone(each.work.tokens, sizes) for each in (one, call)):
            continue
        copies, own = call.concurrent, held[place]
        if not call.ahead or MOST_TOKENS < call.work.tokens <= HOST_IS_SLOWER:
            measured.append(Measured(call.work, copies, call.ended_s - one.ended_s, one.work, own))
        elif following is None:
            continue
        elif not is_graph(call):
            measured.append(Measured(call.work, copies, following.ended_s - one.ended_s, one.work, own))
        elif following.work is None or (following.ahead and is_graph(following)):
            seconds = following.ended_s - call.ended_s
            measured.append(Measured(call.work, copies, seconds, held=held[place + 1]))
    return measured


def graph_is_gone(tokens: float, sizes: list[int]) -> bool:
    """Whether a step of so many tokens ran in a graph of another size than it would today.   sizes: of then"""
    return smallest_that_holds(sizes, tokens) != smallest_that_holds(graph_sizes(), tokens)


def is_graph(call: Call) -> bool:
    return call.work.tokens <= MOST_TOKENS


def waits_for_kernels(one: Measured) -> bool:
    """Whether it took as long as the host took to launch its kernels."""
    return one.before is not None and MOST_TOKENS < one.work.tokens <= HOST_IS_SLOWER


def launches_of_serve(row: dict[str, Any], held: Sequence[Held] = ()) -> list[float]:
    """Seconds of calls that only launched a step: the device had nothing to do before.   held: see `steps_of_serve`"""
    calls = list(calls_of(row))
    idle = (one is None or one.work is None or not one.ahead for one in [None, *calls])
    found = zip(idle, calls, held or [NOT_HELD] * len(calls))
    return [c.ended_s - c.started_s for was_idle, c, why in found if was_idle and c.ahead and why == NOT_HELD]


class Said(NamedTuple):
    """What a result says.

    launches   seconds of calls that only launched a step
    model      fields of `CostModel`
    reads      traffic in which adapters were read
    """

    steps: list[Measured]
    launches: list[float]
    model: dict[str, Any]
    reads: Sequence[ReadTraffic] = ()


def read(path: Path) -> tuple[Said, str]:
    """What a file says, and of which device. ValueError names one that is no such result."""
    wrong = ValueError(f"'{path}' has no steps to fit to; give results of benchmarks.engine or .trust")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        said, device = said_by(result), result["machine"]["device"]
    # A file can be anything: no JSON, no object, without what results have.
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise wrong from error
    if said is None:
        raise wrong
    return said, device


def said_by(result: dict[str, Any]) -> Said | None:
    """None for a result of another kind."""
    kind = result.get("benchmark")
    if kind == "engine-decode":
        return Said(steps_of_decode(result), [], {})
    if kind == "engine-serve":
        return said_by_serve(result)
    if kind == "engine-switch":
        (row,) = [row for row in result["rows"] if row["measure"] == "switch"]
        copy_bytes_per_s = row["bytes"] / (row["complete_ms"] / 1e3)
        bytes_per_rank = row["bytes"] / result["options"]["rank"]
        return Said([], [], {"copy_bytes_per_s": copy_bytes_per_s, "bytes_per_rank": bytes_per_rank})
    if kind == "trust":
        return Said(steps_of_record(result), [], dict(STEPS_WAIT_FOR_COPIES))
    return None


def said_by_serve(result: dict[str, Any]) -> Said:
    """Of `benchmarks.engine serve`, whose adapters' files were in memory: no disk took part in reading them."""
    steps, launches, reads = [], [], []
    for row in result["rows"]:
        found = reads_of(result, row)
        held = [call.held for call in found.calls] if found else ()
        reads += [found] if found else []
        steps += steps_of_serve(row, held)
        launches += launches_of_serve(row, held)
    return Said(steps, launches, {} if launches else dict(STEPS_WAIT_FOR_COPIES), reads)


def fit(paths: Iterable[Path], assumed: Mapping[str, float] | None = None) -> CostModel:
    """One cost model from all these files; `assumed` as in `fit_steps`. ValueError names a file of another kind."""
    measured: list[Measured] = []
    launches: list[float] = []
    model: dict[str, Any] = {}
    reads: list[ReadTraffic] = []
    sources = []
    for path in paths:
        said, device = read(path)
        measured, launches, model = measured + said.steps, launches + said.launches, model | said.model
        reads += said.reads
        sources.append(f"{path.stem} ({device})")
    sources += [f"{name} assumed" for name in assumed or {}]
    plain = [one for one in measured if one.held == NOT_HELD and not waits_for_kernels(one)]
    found = fit_steps(plain, assumed, bool(launches))._asdict()
    known = CostModel(found["step"], prompts=found["prompts"], lora_prompts=found["lora_prompts"])
    if launches:
        # The first call of a run finds nothing to wait for. Some runs launch for the first time in it.
        launch_s, slowed_s = min(launches), found.pop("copy_s")
        model |= {"launch_s": launch_s, "slowed_s": slowed_s, "graph_tokens": MOST_TOKENS}
        model |= host_in(measured, replace(known, launch_s=launch_s))
    cost = CostModel(**found, source=", ".join(sources), **model)
    return replace(cost, **fit_reads(reads[-1], cost).model) if reads else cost


def host_in(measured: Sequence[Measured], known: CostModel) -> dict[str, float]:
    """What the host does before steps, by the names of `CostModel`.   known: what steps take, and `launch_s`"""
    model = before_graphs(late_steps(measured), known)
    known = replace(known, **model)
    for name, lora in (("kernels_s", 0), ("lora_kernels_s", 1)):
        waits = [one for one in measured if waits_for_kernels(one) and one.work.lora == lora]
        if waits:
            model[name] = sum(kernel_seconds(one, known) for one in waits) / len(waits)
    # Of those without adapters there are fewer, but nobody launches them in no time.
    return {"kernels_s": model["lora_kernels_s"]} | model if "lora_kernels_s" in model else model


def late_steps(measured: Sequence[Measured]) -> list[Measured]:
    """Beside which the host had more to do than to launch the next one."""
    return [one for one in measured if any(one.held[:3]) and one.before is None]


def before_graphs(late: Sequence[Measured], known: CostModel) -> dict[str, float]:
    """What the host does while a step runs, of which the device waits for what takes longer than that step."""
    if not late:
        return {}
    seconds = np.array([one.seconds - known.launch_s for one in late])
    hidden = np.array([known.step_seconds(one.work) - known.launch_s for one in late])
    x = np.array([one.held[:3] for one in late]) * [[one.held.stretch] for one in late]
    found = costs(x, seconds)
    for _ in range(10 * ROUNDS):
        seen = x @ found > hidden
        found = costs(x[seen], seconds[seen])
    return dict(zip(("check_s", "take_in_s", "during_reads_s"), found.tolist()))


def kernel_seconds(one: Measured, known: CostModel) -> float:
    """What the host would have taken for a step's kernels if it had shared the interpreter with no read."""
    begins = max(known.step_seconds(one.before), known.host_seconds(one.held))
    return (one.seconds - begins) / one.held.stretch


def assumption(text: str) -> tuple[str, float]:
    """`context=4e-8` -> the work and the seconds for each."""
    name, _, seconds = text.partition("=")
    if name not in StepWork._fields:
        known = ", ".join(StepWork._fields)
        raise ArgumentTypeError(f"'{text}' is not of the form context=4e-8; the work is one of {known}")
    return name, number()(seconds)


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="of benchmarks.engine and benchmarks.trust")
    parser.add_argument("-o", "--out", type=Path, default=Path("cost.json"), help="the cost model to write")
    parser.add_argument(
        "--assume",
        type=assumption,
        action="append",
        default=[],
        help="KIND=SECONDS of work that no result tells apart",
    )
    options = parser.parse_args(arguments)
    model = fit(options.results, dict(options.assume))
    model.save(options.out)
    for name in StepWork._fields:
        print(f"{name:>12} {1e6 * model.step.get(name, 0.0):14,.3f} µs each")
    print(f"{model.source}: see {options.out}")


if __name__ == "__main__":
    run_as_command(NAME, main)
