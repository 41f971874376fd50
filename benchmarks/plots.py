"""Pictures of the engine benchmarks."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.arguments import DORA, MIX

# Okabe and Ito's colours, told apart by colour-blind readers too.
BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
INK, GREY, PALE = "#222222", "#6E6E6E", "#E6E6E6"
DARK = (BLUE, GREEN, RED)
CASE_COLOURS = [SKY, BLUE, GREEN, ORANGE, PINK, RED]

# (case, requests) -> output tokens a second while decoding. vLLM 0.22.1 on an H100 80GB, measured for this
# project with the same workload: the llama-8b shape in bfloat16 on random weights, adapters of rank 16 over all
# linears, greedy, 128 tokens in and 256 out, CUDA graphs on.
VLLM_H100_TOKENS_PER_SECOND = {
    ("base", 1): 160,
    ("none", 1): 158,
    ("1", 1): 125,
    ("base", 32): 4672,
    ("none", 32): 4634,
    ("1", 32): 3819,
    ("8", 32): 2963,
    ("32", 32): 1631,
    ("base", 128): 14621,
    ("none", 128): 14522,
    ("1", 128): 10368,
    ("8", 128): 9007,
    ("32", 128): 5941,
}
VLLM_WORKLOAD = {"model": "llama-8b", "rank": 16, "prompt_tokens": 128, "output_tokens": 256}


def figure_with(columns: int, width: float = 9.5, height: float = 4.6) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0].tolist()
    for axes in panels:
        clean(axes)
    return figure, panels


def clean(axes: Axes) -> None:
    """Nothing but a light grid behind the data."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


def note(figure: Figure, content: dict[str, Any], text: str) -> None:
    """One small line under the picture: where, with what."""
    versions = content["machine"]
    where = f"{versions['device']}, torch {versions['torch']}, {content['date']}"
    figure.supxlabel(f"{text}  ·  {where}", fontsize=8, color=GREY, x=0.01, ha="left")


def legend(where: Axes | Figure, colours: dict[str, str], mark: str | None, **options: Any) -> None:
    """A square for every label of `colours`, and a line for what is marked beside them."""
    square = {"marker": "s", "linestyle": "", "markersize": 9}
    handles = [Line2D([], [], color=colour, label=label, **square) for label, colour in colours.items()]
    if mark:
        handles.append(Line2D([], [], color=INK, linewidth=2.2, label=mark))
    where.legend(handles=handles, frameon=False, fontsize=9, **options)


def case_label(case: str) -> str:
    names = {"none": "LoRA on, none used", "1": "1 adapter"}
    kinds = {DORA: "DoRA adapters", MIX: "mixes", "": "adapters"}
    end = next(end for end in kinds if case.endswith(end))
    return names.get(case, f"{case.removesuffix(end)} {kinds[end]}")


def vllm_rates(content: dict[str, Any]) -> dict[tuple[str, int], int]:
    """vLLM's numbers, if what was measured can be held against them."""
    same = all(content["options"][key] == value for key, value in VLLM_WORKLOAD.items())
    return VLLM_H100_TOKENS_PER_SECOND if same and "H100" in content["machine"]["device"] else {}


def draw_decode(content: dict[str, Any], path: Path) -> None:
    """Each case's share of the base engine's throughput, by requests; nothing without a base to compare with."""
    rates = {(row["case"], row["requests"]): row["tokens_per_second"] for row in content["rows"]}
    requests = sorted({count for case, count in rates if case == "base" and len(_cases(rates, count)) > 1})
    cases = sorted({case for case, _ in rates} - {"base"}, key=lambda case: (case != "none", case.zfill(6)))
    if not requests:
        return
    vllm = vllm_rates(content)
    colours = dict(zip(cases, itertools.cycle(CASE_COLOURS)))
    figure, (axes,) = figure_with(columns=1)
    left, ticks = 0.0, []
    for count in requests:
        shown = [case for case in cases if (case, count) in rates]
        for place, case in enumerate(shown):
            share = 100 * rates[case, count] / rates["base", count]
            x = left + place
            axes.bar(x, share, 0.86, color=colours[case])
            style = {"color": "white" if colours[case] in DARK else INK, "fontsize": 9, "fontweight": "bold"}
            axes.text(x, 2.5, f"{share:.0f}%", ha="center", **style)
            if (case, count) in vllm:
                peer = 100 * vllm[case, count] / vllm["base", count]
                axes.plot([x - 0.47, x + 0.47], [peer, peer], color=INK, linewidth=2.2)
        ticks.append((left + (len(shown) - 1) / 2, _group_label(count, rates, vllm)))
        left += len(shown) + 1
    axes.set_xticks(*zip(*ticks))
    axes.axhline(100, color=GREY, linewidth=1)
    axes.set_ylabel("share of the base engine's throughput (%)", color=INK)
    axes.set_ylim(bottom=0)
    peer_label = "vLLM 0.22.1, of its own base" if vllm else None
    labels = {case_label(case): colour for case, colour in colours.items()}
    legend(axes, labels, peer_label, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6)
    options = content["options"]
    shape = f"{options['prompt_tokens']} tokens in, {options['output_tokens']} out, greedy"
    note(figure, content, f"{Path(options['model']).name} shape, rank {options['rank']}, {shape}")
    figure.savefig(path)


def _cases(rates: dict[tuple[str, int], float], count: int) -> list[str]:
    return [case for case, requests in rates if requests == count]


def _group_label(count: int, rates: dict, vllm: dict) -> str:
    plural = "" if count == 1 else "s"
    label = f"{count} request{plural}\nbase {rates['base', count]:,.0f} tokens/s"
    return f"{label}\n(vLLM {vllm['base', count]:,})" if ("base", count) in vllm else label


def draw_serve(content: dict[str, Any], path: Path) -> None:
    """How many requests, and how many gaps between tokens, took no longer than so many milliseconds."""
    figure, panels = figure_with(columns=2, height=3.9)
    colours = {"base": GREY, "lora": BLUE}
    titles = {"ttft": "time to first token (ms)", "itl": "time between tokens (ms)"}
    options = content["options"]
    for axes, (name, title) in zip(panels, titles.items()):
        for row in {row["case"]: row for row in content["rows"]}.values():
            label = _serve_label(row, options)
            values = row[f"{name}_quantiles_ms"]
            axes.plot(values, range(101), color=colours[row["case"]], linewidth=2.2, label=label)
            axes.plot([values[50], values[99]], [50, 99], "o", color=colours[row["case"]], markersize=5)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(axis="x", color=PALE, linewidth=0.8)
        axes.set_xlabel(title, color=INK)
        axes.set_ylim(0, 101)
    panels[0].set_ylabel("share that took no longer (%)", color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    traffic = f"{options['num_requests']} requests, {options['rate']:g} a second, Zipf {options['alpha']:g}"
    note(
        figure,
        content,
        f"{Path(options['model']).name} shape, rank {options['rank']}, {traffic}, dots: p50 and p99",
    )
    figure.savefig(path)


def _serve_label(row: dict[str, Any], options: dict[str, Any]) -> str:
    rate = f"{row['tokens_per_second']:,.0f} tokens/s"
    if row["case"] == "base":
        return f"base: {rate}"
    return (
        f"{options['adapters']} adapters on {row['slots']} slots: {rate}, {row['evictions']} evictions, "
        f"{row['loads']} loads"
    )


def draw_switch(content: dict[str, Any], path: Path) -> None:
    """Every sample as a point, medians as bars: the copy alone, and steps with and without one."""
    rows = {row["measure"]: row for row in content["rows"]}
    if len(rows) < 2:
        return
    figure, (copies, steps) = figure_with(columns=2, height=3.6)
    calls, completions = zip(*rows["switch"]["samples_ms"])
    _points(copies, {"call returns": calls, "weights\nin the slot": completions}, BLUE)
    samples, running = rows["steps"]["samples_ms"], rows["steps"]["running"]
    kinds = {
        "decode": "decode\nalone",
        "copy": "an adapter\ncomes beside it",
        "arrival": "a request\narrives",
        "switch": "a request whose\nadapter came",
    }
    _points(steps, {label: samples[kind] for kind, label in kinds.items()}, GREEN)
    copies.set_ylabel("one switch (ms)", color=INK)
    steps.set_ylabel(f"a step of {running} running requests (ms)", color=INK)
    options = content["options"]
    size = f"{rows['switch']['bytes'] / 1e6:.3g} MB an adapter"
    note(figure, content, f"{Path(options['model']).name} shape, rank {options['rank']}, {size}")
    figure.savefig(path)


def _points(axes: Axes, groups: dict[str, Sequence[float]], colour: str) -> None:
    for x, values in enumerate(groups.values()):
        middle = float(np.median(values))
        spread = np.linspace(-0.22, 0.22, len(values)) if len(values) > 1 else [0]
        axes.bar(x, middle, 0.62, color=colour, alpha=0.25)
        axes.plot(x + np.asarray(spread), values, "o", color=colour, markersize=3, alpha=0.8)
        axes.plot([x - 0.31, x + 0.31], [middle, middle], color=colour, linewidth=2.2)
        axes.annotate(
            f"{middle:.3g}", (x + 0.34, middle), va="center", fontsize=9, fontweight="bold", color=INK
        )
    axes.set_xticks(range(len(groups)), groups, fontsize=9)
    axes.set_xlim(-0.5, len(groups) - 0.3)
    # Room for the highest of the usual samples; a rare stall may leave the picture, the JSON has it.
    axes.set_ylim(0, 1.25 * max(float(np.percentile(values, 95)) for values in groups.values()))
