"""Draws picture.svg: one request from a socket to the engine's thread, and its tokens on their way back."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

INK, MUTED = "#222222", "#666666"
LOOP, ENGINE, CLIENT = "#0072B2", "#E69F00", "#009E73"


def lane(axes: Axes, y: float, name: str, note: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (0, y), 12, 1.1, boxstyle="round,pad=0.08", facecolor=colour, alpha=0.10, edgecolor="none"
        )
    )
    axes.text(0.05, y + 0.78, name, fontsize=9.5, fontweight="bold", color=INK)
    axes.text(0.05, y + 0.45, note, fontsize=8, color=MUTED, va="center")


def box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y + 0.22),
            width,
            0.66,
            boxstyle="round,pad=0.04",
            facecolor="white",
            edgecolor=colour,
            linewidth=1.4,
        )
    )
    axes.text(x + width / 2, y + 0.55, text, fontsize=8, color=INK, ha="center", va="center")


def arrow(axes: Axes, x0: float, y0: float, x1: float, y1: float, text: str = "", **style: str) -> None:
    options = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, **style}
    axes.annotate("", (x1, y1), (x0, y0), arrowprops=options)
    if text:
        axes.text((x0 + x1) / 2 + 0.1, (y0 + y1) / 2, text, fontsize=7.5, color=MUTED, va="center")


def draw() -> Figure:
    figure = Figure(figsize=(9.6, 4.6))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-0.2, 12.3), ylim=(-0.3, 5.3))
    axes.axis("off")
    lane(axes, 4, "clients", "sockets", CLIENT)
    lane(axes, 2, "event loop", "one thread, all\nconnections", LOOP)
    lane(axes, 0, "engine", "one thread,\none batch", ENGINE)

    box(axes, 2.0, 4, 1.7, "POST, model=sql", CLIENT)
    box(axes, 6.6, 4, 2.0, "data: … data: …", CLIENT)
    box(axes, 9.5, 4, 2.2, "closes the tab", CLIENT)

    box(axes, 2.0, 2, 1.7, "a name to an\nadapter  (9.4)", LOOP)
    box(axes, 4.1, 2, 1.7, "generate()", LOOP)
    box(axes, 6.6, 2, 2.0, "take(): all there is\n(9.2)", LOOP)
    box(axes, 9.5, 2, 2.2, "finally: abort  (9.3)", LOOP)

    box(axes, 4.1, 0, 1.7, "calls, between\ntwo steps  (9.1)", ENGINE)
    box(axes, 6.6, 0, 2.0, "step: tokens for all", ENGINE)
    box(axes, 9.5, 0, 2.2, "row, blocks, slot free", ENGINE)

    arrow(axes, 2.85, 4.2, 2.85, 2.95)
    arrow(axes, 3.75, 2.55, 4.05, 2.55)
    arrow(axes, 4.95, 2.2, 4.95, 0.95, "a function,\na future")
    arrow(axes, 5.85, 0.55, 6.55, 0.55)
    arrow(axes, 7.6, 0.9, 7.6, 2.15, "put(): merged\nwith what waits")
    arrow(axes, 7.6, 2.9, 7.6, 4.15, "when it can")
    arrow(axes, 10.6, 4.2, 10.6, 2.95)
    arrow(axes, 10.6, 2.2, 10.6, 0.95, "nobody waits", linestyle="--")
    return figure


if __name__ == "__main__":
    matplotlib.rcParams.update(
        {"svg.hashsalt": "minivllm", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
    )
    draw().savefig(Path(__file__).with_name("picture.svg"), metadata={"Date": None})
