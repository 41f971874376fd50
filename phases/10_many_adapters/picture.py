"""Draws picture.svg: the way of a request through a fleet, and the four decisions on it."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

INK, MUTED = "#222222", "#666666"
ENGINES = ("#0072B2", "#E69F00", "#009E73")
ADAPTERS = ("#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#9aa0a6")
POINTS = ((20, 0), (75, 1), (110, 2), (160, 0), (205, 2), (250, 1), (300, 0), (335, 2))  # degrees, engine


def say(axes: Axes, x: float, y: float, title: str, text: str) -> None:
    axes.text(x, y, title, fontsize=9.5, fontweight="bold", color=INK, va="top")
    axes.text(x, y - 0.3, text, fontsize=8, color=MUTED, va="top", linespacing=1.35)


def cells(axes: Axes, x: float, y: float, colours: tuple[int, ...], places: int, name: str) -> None:
    """Places side by side, the first of them taken by adapters of these colours."""
    for place in range(places):
        colour = ADAPTERS[colours[place]] if place < len(colours) else "white"
        axes.add_patch(
            Rectangle((x + 0.3 * place, y), 0.3, 0.3, facecolor=colour, edgecolor=INK, linewidth=0.8)
        )
    axes.text(x, y + 0.38, name, fontsize=8, color=INK)


def arrow(axes: Axes, x0: float, y0: float, x1: float, y1: float, **style: object) -> None:
    options = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, **style}
    axes.annotate("", (x1, y1), (x0, y0), arrowprops=options)


def ring(axes: Axes, x: float, y: float, radius: float) -> None:
    axes.add_patch(Circle((x, y), radius, fill=False, edgecolor=MUTED, linewidth=1.2))
    for degrees, engine in POINTS:
        angle = np.radians(degrees)
        place = x + radius * np.cos(angle), y + radius * np.sin(angle)
        axes.add_patch(Circle(place, 0.09, facecolor=ENGINES[engine], edgecolor="none", zorder=3))
    angle = np.radians(130)
    start = x + radius * np.cos(angle), y + radius * np.sin(angle)
    axes.plot(*start, marker="D", markersize=7, color=ADAPTERS[0], zorder=4)
    axes.text(start[0] - 0.15, start[1] + 0.12, "the adapter", fontsize=7.5, color=INK, ha="right")
    arc = np.radians(np.linspace(133, 156, 12))
    axes.plot(x + radius * np.cos(arc), y + radius * np.sin(arc), color=ADAPTERS[0], linewidth=3)


def draw() -> Figure:
    figure = Figure(figsize=(9.6, 4.7))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-0.1, 12.4), ylim=(-0.2, 5.9), aspect="equal")
    axes.axis("off")

    say(axes, 0, 5.8, "which engine  (10.5)", "the next point on the ring;\nif that one is full, the next")
    ring(axes, 1.6, 2.9, 1.05)
    for number, colour in enumerate(ENGINES):
        y = 1.0 - 0.45 * number
        axes.add_patch(Rectangle((0.75, y), 0.3, 0.3, facecolor=colour, edgecolor="none"))
        axes.text(1.15, y + 0.15, f"engine {number}", fontsize=8, color=INK, va="center")
    arrow(axes, 2.75, 2.9, 3.85, 2.9)

    box = FancyBboxPatch((3.95, 0.25), 8.3, 3.75, boxstyle="round,pad=0.08", linewidth=1.4)
    box.set(facecolor="#0072B20F", edgecolor=ENGINES[0])
    axes.add_patch(box)
    axes.text(12.15, 0.35, "engine 0", fontsize=8.5, color=ENGINES[0], ha="right")

    say(axes, 4.1, 5.8, "who goes first  (10.3)", "the adapter that was\nserved least")
    cells(axes, 4.15, 2.75, (0, 0, 2, 0, 1, 3), 6, "requests that wait")
    arrow(axes, 5.05, 4.75, 5.05, 3.5, linestyle="--", color=MUTED)
    say(axes, 6.7, 5.8, "what is read ahead  (10.4)", "by place in the queue,\nby session")
    cells(axes, 4.15, 0.75, (3, 4, 2, 1, 0), 5, "disk: all adapters")
    cells(axes, 7.7, 0.75, (2, 1, 0, 4), 5, "memory: some")
    arrow(axes, 5.8, 0.9, 7.55, 0.9)
    axes.text(6.3, 0.62, "42 ms", fontsize=8, color=MUTED)
    axes.text(10.1, 1.15, "2 ms", fontsize=8, color=MUTED)
    arrow(axes, 7.0, 4.75, 6.8, 1.0, linestyle="--", color=MUTED)
    say(axes, 9.8, 5.8, "who is kept  (10.2)", "uses × cost / size,\nand age")
    cells(axes, 10.4, 1.9, (0, 1, 2), 3, "slots")
    arrow(axes, 9.3, 1.05, 10.75, 1.8)
    arrow(axes, 10.9, 4.75, 10.9, 2.65, linestyle="--", color=MUTED)
    arrow(axes, 10.4, 4.75, 8.6, 1.5, linestyle="--", color=MUTED)
    axes.text(8.05, 2.9, "a step,\nsome 10 ms", fontsize=8, color=INK, ha="center", va="center")
    arrow(axes, 6.1, 2.9, 7.45, 2.9)
    arrow(axes, 10.3, 2.15, 8.65, 2.8)
    return figure


if __name__ == "__main__":
    matplotlib.rcParams.update(
        {"svg.hashsalt": "minivllm", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
    )
    draw().savefig(Path(__file__).with_name("picture.svg"), metadata={"Date": None})
