"""`python -m benchmarks.layers`: the multi-LoRA linears of one transformer layer, timed. See README.md."""

import functools
import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import plot_layers
from benchmarks.arguments import run_as_command
from benchmarks.layer_arguments import NAME, parse
from benchmarks.layer_block import Block
from benchmarks.layer_cases import TABLE, Case, Linear, packed_linears
from benchmarks.options import free_memory
from benchmarks.report import Report, default_path
from benchmarks.timing import copy_bandwidth, medians_us, replayable

Make = Callable[..., Callable[[torch.Tensor], torch.Tensor]]

BASE = "benchmarks.impls:base"
DEFAULT_IMPLS = ["benchmarks.impls:sgmv", "benchmarks.impls:paged"]
DEFAULT_CASES = [
    *("decode:1:8:16", "decode:32:8:16", "decode:64:32:16", "decode:256:32:16", "decode:64:8:64"),
    *("prefill:2048:8:16", "prefill:8192:8:16", "prefill:4096:4:64"),
]
CHECKED_ROWS = 512


def run_case(
    text: str, mix: str, model: str, impls: dict[str, Make], options: Namespace, bandwidth: float
) -> dict[str, Any]:
    """Microseconds a layer of every implementation, and how far it is from float64.

    floor_us   what reading A and B of the slots in use once takes at the bandwidth of a copy
    block      whether the layer is a whole block, but for its attention
    """
    case = Case.parse(text)
    like = torch.empty(0, dtype=getattr(torch, options.dtype), device=options.device)
    ranks, token_slots = case.ranks(mix), case.token_slots(mix).to(like.device)
    linears = packed_linears(model)
    layers = [
        {name: Linear.random(k, slices, ranks, case.rank, like) for name, (k, slices) in linears.items()}
        for _ in range(options.layers)
    ]
    xs = {
        name: torch.randn(case.tokens, k, dtype=like.dtype, device=like.device)
        for name, (k, _) in linears.items()
    }
    used = [slot for slot in token_slots.unique().tolist() if slot >= 0]
    numbers = sum(ranks[s] * (len(slices) * k + sum(slices)) for s in used for k, slices in linears.values())
    row = {
        "case": text,
        "mix": mix,
        "model": model,
        "block": options.block,
        "slots_used": len(used),
        "floor_us": numbers * like.itemsize / bandwidth * 1e6,
    }
    block = Block(model, case.tokens, like) if options.block else None
    works, made = {}, {}  # a graph reads memory that belongs to what was made
    for name, make in impls.items():
        wanted = torch.full_like(token_slots, -1) if name == "base" else token_slots
        try:
            runs = made[name] = make_all(make, case, layers, wanted, ranks)
            row[name] = {"us": float("nan"), "error": worst_error(runs[0], layers[0], xs, wanted)}
            works[name] = replayable(work_of(runs, xs, block), like.device)
        except Exception as problem:  # whatever a foreign implementation may raise; the others go on
            row[name] = {"us": float("nan"), "error": f"{type(problem).__name__}: {problem}"[:200]}
    for name, us in medians_us(works, like.device).items():
        row[name]["us"] = us / options.layers
    return row


Layer = dict[str, Callable[[torch.Tensor], torch.Tensor]]


def make_all(
    make: Make, case: Case, layers: list[dict[str, Linear]], token_slots: torch.Tensor, ranks: list[int]
) -> list[Layer]:
    return [
        {
            name: make(one.w, one.a, one.b, one.slices, token_slots, ranks, case.phase)
            for name, one in layer.items()
        }
        for layer in layers
    ]


def work_of(runs: list[Layer], xs: dict[str, torch.Tensor], block: Block | None) -> Callable[[], object]:
    """All layers, one after the other: their linears, or whole blocks."""
    if block is None:
        steps = [functools.partial(run, xs[name]) for layer in runs for name, run in layer.items()]
    else:
        steps = [block.around(layer) for layer in runs]
    return lambda: [step() for step in steps]


def worst_error(
    layer: Layer, linears: dict[str, Linear], xs: dict[str, torch.Tensor], token_slots: torch.Tensor
) -> float:
    return max(
        relative_error(run(xs[name]), linears[name], xs[name], token_slots) for name, run in layer.items()
    )


def relative_error(y: torch.Tensor, linear: Linear, x: torch.Tensor, token_slots: torch.Tensor) -> float:
    """Norm of the difference from float64 over the norm, on rows drawn at random."""
    rows = torch.randperm(len(x), device=x.device)[:CHECKED_ROWS]
    expected = linear.expected(x[rows], token_slots[rows])
    return ((y[rows].double() - expected).norm() / expected.norm()).item()


def summary(row: dict[str, Any]) -> str:
    base, floor = row["base"]["us"], row["floor_us"]
    which = f"{row['model']} {row['case']} {row['mix']}: {row['slots_used']} slots used"
    lines = [f"{which}, base {base:.1f} us, floor {floor:.1f} us"]
    for name, result in plot_layers.results_of(row).items():
        added = result["us"] - base
        over = f"{added / floor:.2f} x floor" if floor else ""
        times = f"{added:+9.1f} us  {added / base:+7.1%}  {over:14s}"
        error = result["error"] if isinstance(result["error"], str) else f"{result['error']:.1e}"
        lines.append(f"  {name:26s} {times}  error {error}")
    return "\n".join(lines)


def load_impl(spec: str) -> Make:
    """ValueError for what is not there."""
    module, _, name = spec.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"--impl {spec}: {error}") from None
    except AttributeError:
        there_are = [name for name, value in vars(sys.modules[module]).items() if callable(value)]
        own = sorted(name for name in there_are if not name.startswith("_") and name.islower())
        raise ValueError(f"--impl {spec}: {module} has no '{name}'; it has {', '.join(own)}") from None


def main(arguments: Sequence[str]) -> None:
    """Measure, write the JSON row by row, and draw it; or draw what was measured before."""
    options = parse(arguments)
    if options.plot_from:
        plot_layers.draw(
            json.loads(options.plot_from.read_text()), options.plot or options.plot_from.with_suffix(".png")
        )
        return
    impls = {"base": load_impl(BASE)}
    impls |= {spec: load_impl(spec) for spec in options.impl or DEFAULT_IMPLS}
    cases = [(text, options.mix, options.model) for text in options.case or DEFAULT_CASES]
    cases = [tuple(line.split()) for line in TABLE] if options.table else cases
    path = options.json or default_path("layers", options.device)
    kept = {name: getattr(options, name) for name in ("layers", "dtype")}
    report = Report(path, "layers", kept, options.device)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(torch.device(options.device))
    print(f"{report.content['machine']['device']}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    with torch.inference_mode():
        for case in cases:
            row = run_case(*case, impls, options, bandwidth)
            free_memory()
            report.add(row, summary(row))
    plot_layers.draw(report.content, options.plot or path.with_suffix(".png"))


if __name__ == "__main__":
    run_as_command(NAME, main)
