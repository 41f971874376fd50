"""Pictures of the engine benchmarks."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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


def figure_with_axes(width: float = 9.5, height: float = 4.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    axes = figure.subplots()
    clean(axes)
    return figure, axes


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


def case_label(case: str) -> str:
    names = {"none": "LoRA on, none used", "1": "1 adapter"}
    return names.get(case, f"{case} adapters")


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
    figure, axes = figure_with_axes()
    left, ticks = 0.0, []
    for count in requests:
        shown = [case for case in cases if (case, count) in rates]
        for place, case in enumerate(shown):
            share = 100 * rates[case, count] / rates["base", count]
            x = left + place
            colour = CASE_COLOURS[cases.index(case) % len(CASE_COLOURS)]
            axes.bar(x, share, 0.86, color=colour)
            style = {"color": "white" if colour in DARK else INK, "fontsize": 9, "fontweight": "bold"}
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
    _decode_legend(axes, cases, bool(vllm))
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


def _decode_legend(axes: Axes, cases: list[str], with_vllm: bool) -> None:
    handles = [
        Line2D([], [], marker="s", linestyle="", markersize=9, color=CASE_COLOURS[i % len(CASE_COLOURS)])
        for i in range(len(cases))
    ]
    labels = [case_label(case) for case in cases]
    if with_vllm:
        handles.append(Line2D([], [], color=INK, linewidth=2.2))
        labels.append("vLLM 0.22.1, of its own base")
    axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, frameon=False, fontsize=9
    )
