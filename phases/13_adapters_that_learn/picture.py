"""Draws picture.svg: a request under way when its adapter is updated, and whose keys and values it ends with."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

INK, MUTED = "#222222", "#666666"
VERSIONS = ("#0072B2", "#E69F00")
PROMPT, BEFORE, TOKENS = 5, 3, 11  # of the prompt; of the answer, before the update; in all
# What becomes of it; the version that computed each token's keys and values, and the one that sampled it.
ROWS = (
    ("finish", 0, 0),
    ("restart", 1, 1),
    ("new weights in its place", None, 1),
)


def draw_row(axes: Axes, y: float, name: str, computed: int | None, samples: int) -> None:
    axes.text(-0.2, y + 0.35, name, fontsize=9, color=INK, ha="right", va="center")
    for token in range(TOKENS):
        is_old = token < PROMPT + BEFORE
        whose = (0 if is_old else 1) if computed is None else computed
        axes.add_patch(Rectangle((token, y), 0.9, 0.7, facecolor=VERSIONS[whose], edgecolor="none"))
        if token >= PROMPT:
            sampled = 0 if is_old else samples
            ink = "white" if whose == 0 else INK
            axes.text(token + 0.45, y + 0.35, f"{sampled}", fontsize=9, color=ink, ha="center", va="center")


def draw() -> Figure:
    figure = Figure(figsize=(8.4, 2.6))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-4.4, TOKENS + 0.1), ylim=(-0.7, 3.6), aspect="equal")
    axes.axis("off")
    for number, row in enumerate(ROWS):
        draw_row(axes, 2 - number, *row)
    border = PROMPT + BEFORE - 0.05
    axes.plot([border, border], [-0.1, 3.0], color=INK, linewidth=1.2, linestyle="--")
    axes.text(border, 3.05, "update", fontsize=9, color=INK, ha="center", va="bottom")
    axes.text(PROMPT / 2, 2.85, "prompt", fontsize=9, color=MUTED, ha="center", va="bottom")
    for number, colour in enumerate(VERSIONS):
        x = 5.6 * number - 0.2
        axes.add_patch(Rectangle((x, -0.6), 0.35, 0.35, facecolor=colour, edgecolor="none"))
        text = f"keys and values of version {number}"
        axes.text(x + 0.5, -0.43, text, fontsize=8.5, color=INK, va="center")
    return figure


if __name__ == "__main__":
    matplotlib.rcParams.update(
        {"svg.hashsalt": "minivllm", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
    )
    draw().savefig(Path(__file__).with_name("picture.svg"), metadata={"Date": None})
