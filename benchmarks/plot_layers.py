"""The picture of a layer benchmark, from the file of layers.py or a plain list of such rows."""

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.plots import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, figure_with, legend, note

# Names and colours that stay with an implementation, whichever others are in the picture.
KNOWN = {
    "vllm": ("vLLM 0.22.1", ORANGE),
    "sglang_v1": ("SGLang 0.5.23 triton", PINK),
    "sglang_v2": ("SGLang 0.5.23 triton_v2", RED),
    "benchmarks.impls:looped": ("run by run, in PyTorch", "#8C8C8C"),
    "benchmarks.impls:gathered": ("gathered for each row", "#332288"),
    "benchmarks.impls:sgmv": ("minivllm, shrink and expand", SKY),
    "benchmarks.impls:folded": ("minivllm, folded (until 2026-11-24)", BLUE),
    "benchmarks.impls:paged": ("minivllm, paged", GREEN),
}

SPREAD = 100


def results_of(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Implementation -> {"us", "error"}, without the base."""
    return {name: value for name, value in row.items() if isinstance(value, dict) and name != "base"}


def draw(content: dict[str, Any] | list[dict[str, Any]], path: Path) -> None:
    """Time added to the base layer by each implementation, case by case, over the least that the bytes allow.

    Decode and prefill have a scale each. What an implementation could not do is left out.
    """
    measured = content if isinstance(content, list) else content["rows"]
    rows = list(
        {(row["model"], row["case"], row["mix"]): row for row in measured}.values()
    )  # the latest of each
    names = list(dict.fromkeys(name for row in rows for name in results_of(row)))
    ordered = sorted(names, key=lambda name: list(KNOWN).index(name) if name in KNOWN else len(KNOWN))
    groups = {
        phase: [row for row in rows if row["case"].startswith(phase)] for phase in ("decode", "prefill")
    }
    groups = {phase: found for phase, found in groups.items() if found}
    figure, panels = figure_with(columns=len(groups), width=1.5 + 1.35 * max(4, len(rows)), height=4.6)
    panels[0].get_gridspec().set_width_ratios([len(found) for found in groups.values()])
    for axes, (phase, found) in zip(panels, groups.items()):
        _draw_phase(axes, phase, found, ordered)
    what = "block" if any(row.get("block") for row in rows) else "layer"
    panels[0].set_ylabel(f"added to the base {what} (µs)", color=INK)
    labels = dict(_look(name, ordered) for name in ordered)
    legend(figure, labels, "reading the adapters once", loc="outside upper left", ncols=3)
    if isinstance(content, dict):
        models = ", ".join(dict.fromkeys(row["model"] for row in rows))
        parts = {"block": "a block without its attention", "layer": "the linears of a layer"}
        note(figure, content, f"{parts[what]}, {models}, {content['options']['dtype']}")
    figure.savefig(path)


def _look(name: str, names: list[str]) -> tuple[str, str]:
    """Label and colour."""
    unknown = [each for each in names if each not in KNOWN]
    spare = ["#999933", "#882255", "#117733", "#661100"]
    return KNOWN.get(name) or (name, spare[unknown.index(name) % len(spare)])


def _draw_phase(axes: Axes, phase: str, rows: list[dict[str, Any]], names: list[str]) -> None:
    width = 0.84 / len(names)
    for x, row in enumerate(rows):
        for place, name in enumerate(names):
            added = results_of(row).get(name, {"us": math.nan})["us"] - row["base"]["us"]
            if math.isnan(added):
                continue
            left = x - 0.42 + place * width
            axes.bar(left, added, 0.92 * width, align="edge", color=_look(name, names)[1])
            axes.text(
                left + width / 2,
                max(added, 0),
                f" {added:.0f}",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=8,
            )
        axes.plot([x - 0.44, x + 0.44], [row["floor_us"]] * 2, color=INK, linewidth=2.2)
    axes.set_xticks(range(len(rows)), [_case_label(row) for row in rows], fontsize=8.5)
    spread = _is_spread(rows)
    if spread:
        axes.set_yscale("log")
    axes.set_title(
        f"{phase}, on a logarithmic scale" if spread else phase, loc="left", fontsize=10.5, color=INK
    )
    axes.margins(y=0.12)


def _is_spread(rows: list[dict[str, Any]]) -> bool:
    """Whether bars of one scale would hide the short ones."""
    added = [result["us"] - row["base"]["us"] for row in rows for result in results_of(row).values()]
    positive = [us for us in added if us > 0]  # nan is not
    return len(positive) > 1 and max(positive) > SPREAD * min(positive)


def _case_label(row: dict[str, Any]) -> str:
    _, tokens, slots, rank = row["case"].split(":")
    mix = {"uniform": "", "ranks": "\nmixed ranks"}.get(row["mix"], f"\n{row['mix']}")
    counts = f"{tokens} token{'s' * (tokens != '1')}\n{slots} slot{'s' * (slots != '1')}"
    return f"{counts}\nrank {rank}{mix}\nbase {row['base']['us']:,.0f} µs"
