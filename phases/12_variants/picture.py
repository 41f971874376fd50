"""Draws picture.svg: three requests over one conversation, and whose each block is."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

INK, MUTED = "#222222", "#666666"
BASE, ADAPTERS = "#d9d9d9", ("#0072B2", "#E69F00")
BLOCK, BLOCKS = 4, 12
# Who asks, and from which token on an adapter computes; None: never.
REQUESTS = (("the base model", None), ("an adapter, from token 26", 26), ("another one, from token 36", 36))


def draw_block(axes: Axes, x: float, y: float, first: int, start: int | None, colour: str) -> None:
    """A block's tokens in the colours of who computed them; framed where all of it is the base model's."""
    border = BLOCK if start is None else min(max(start - first, 0), BLOCK)
    width = 0.9
    for begin, end, own in ((0, border, BASE), (border, BLOCK, colour)):
        part = width * (end - begin) / BLOCK
        axes.add_patch(Rectangle((x + width * begin / BLOCK, y), part, 0.62, facecolor=own, edgecolor="none"))
    shared = border == BLOCK
    axes.add_patch(
        Rectangle((x, y), width, 0.62, facecolor="none", edgecolor=INK, linewidth=1.6 if shared else 0.5)
    )
    ink = "white" if border == 0 and colour == ADAPTERS[0] else INK
    axes.text(x + width / 2, y + 0.31, str(first), fontsize=8, color=ink, ha="center", va="center")


def draw() -> Figure:
    figure = Figure(figsize=(9.6, 2.7))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-3.3, BLOCKS + 0.1), ylim=(-0.75, 3.1), aspect="equal")
    axes.axis("off")
    for number, (name, start) in enumerate(REQUESTS):
        y = 2.1 - number
        axes.text(-0.15, y + 0.31, name, fontsize=9, color=INK, ha="right", va="center")
        for block in range(BLOCKS):
            draw_block(axes, block, y, BLOCK * block, start, ADAPTERS[max(number - 1, 0)])
    axes.text(0, 2.85, "first token of each block", fontsize=8, color=MUTED)
    for number, (colour, name) in enumerate(
        (
            (BASE, "computed by the base model"),
            (ADAPTERS[0], "by the first adapter"),
            (ADAPTERS[1], "by the second"),
        )
    ):
        x = 4.2 * number
        axes.add_patch(Rectangle((x, -0.62), 0.3, 0.3, facecolor=colour, edgecolor=INK, linewidth=0.5))
        axes.text(x + 0.42, -0.47, name, fontsize=8.5, color=INK, va="center")
    return figure


if __name__ == "__main__":
    matplotlib.rcParams.update(
        {"svg.hashsalt": "minivllm", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
    )
    draw().savefig(Path(__file__).with_name("picture.svg"), metadata={"Date": None})
