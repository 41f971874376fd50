"""Draws picture.svg: which part of A and B each of two processes has, and where they meet."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

INK, MUTED, BOTH = "#222222", "#666666", "#d9d9d9"
PROCESSES = ("#0072B2", "#E69F00")
PANELS = (
    # title, how A is cut, how B is cut, what h is, what becomes of y
    ("column-parallel (q, k, v, gate, up)", None, "rows", "h: both have all", "y: each has some outputs"),
    ("row-parallel (o, down)", "columns", None, "h: a term each", "y: a term each, summed with the base's"),
    ("column-parallel, fully sharded", "rows", "rows", "h: gathered", "y: each has some outputs"),
    ("row-parallel, fully sharded", "columns", "rows", "h: summed", "y: own columns of a term, summed"),
)


def matrix(axes: Axes, x: float, y: float, width: float, height: float, cut: str | None, name: str) -> None:
    """A matrix, each process's half in its colour; grey where both have all of it."""
    halves = {
        None: [(x, y, width, height, BOTH)],
        "rows": [
            (x, y + height / 2, width, height / 2, PROCESSES[0]),
            (x, y, width, height / 2, PROCESSES[1]),
        ],
        "columns": [
            (x, y, width / 2, height, PROCESSES[0]),
            (x + width / 2, y, width / 2, height, PROCESSES[1]),
        ],
    }[cut]
    for left, bottom, wide, high, colour in halves:
        axes.add_patch(Rectangle((left, bottom), wide, high, facecolor=colour, edgecolor=INK, linewidth=0.8))
    axes.text(x + width / 2, y + height + 0.1, name, fontsize=9, color=INK, ha="center")


def panel(axes: Axes, x: float, y: float, title: str, a: str | None, b: str | None, h: str, out: str) -> None:
    axes.text(x, y + 2.75, title, fontsize=9.5, fontweight="bold", color=INK)
    matrix(axes, x + 0.1, y + 0.95, 2.2, 0.6, a, "A (r, K)")
    matrix(axes, x + 4.4, y + 0.2, 0.6, 2.1, b, "B (N, r)")
    is_meeting = h.endswith(("gathered", "summed"))
    arrow = {"arrowstyle": "-|>", "color": "#D55E00" if is_meeting else INK, "linewidth": 1.4}
    axes.annotate("", (x + 4.2, y + 1.25), (x + 2.5, y + 1.25), arrowprops=arrow)
    axes.text(
        x + 3.35,
        y + 1.4,
        h,
        fontsize=8,
        color=arrow["color"],
        ha="center",
        fontweight="bold" if is_meeting else "normal",
    )
    axes.text(x + 0.1, y - 0.1, out, fontsize=8, color=MUTED)


def draw() -> Figure:
    figure = Figure(figsize=(9.6, 5.2))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-0.2, 12.4), ylim=(-0.7, 6.7), aspect="equal")
    axes.axis("off")
    for number, (title, *rest) in enumerate(PANELS):
        panel(axes, 6.4 * (number % 2), 3.5 - 3.5 * (number // 2), title, *rest)
    for number, (colour, name) in enumerate(
        zip((*PROCESSES, BOTH), ("process 0", "process 1", "both"), strict=True)
    ):
        axes.add_patch(Rectangle((3.6 + 2.0 * number, -0.62), 0.25, 0.25, facecolor=colour, edgecolor=INK))
        axes.text(3.95 + 2.0 * number, -0.5, name, fontsize=8.5, color=INK, va="center")
    return figure


if __name__ == "__main__":
    matplotlib.rcParams.update(
        {"svg.hashsalt": "minivllm", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
    )
    draw().savefig(Path(__file__).with_name("picture.svg"), metadata={"Date": None})
