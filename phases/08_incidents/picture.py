"""Draws picture.svg: what three tests of one hunt say on a sound engine, a broken one, its variants and all others."""

from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from labs.kit.hunt import read_hunts

INK, MUTED = "#222222", "#666666"
PASSES, FAILS = "#0072B2", "#E69F00"
SIDE, STEP, GROUP = 0.40, 0.47, 0.40  # of a cell, from cell to cell, between kinds of engine
LEFT, ROW, IN_A_LINE = 3.1, 1.3, 12
HUNT = "8.7"


class Outcome(NamedTuple):
    """What a test of the hunt did when it was run on every engine.

    forms       of its own fault, the incident first, on which it fails
    elsewhere   other hunts with whose fault it fails
    """

    name: str
    what: str
    forms: int
    elsewhere: tuple[int, ...] = ()


TESTS = [
    Outcome("right", "compares the answer after\na reload with the merged model's", 3),
    Outcome("too weak", "asks the one function that\nwas broken, and nothing else", 1),
    Outcome("too strong", "counts reads from disk as well", 3, (15,)),
]


def cell(axes: Axes, x: float, y: float, label: str, fails: bool, is_wrong: bool) -> None:
    box = FancyBboxPatch(
        (x, y),
        SIDE,
        SIDE,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=FAILS if fails else PASSES,
        edgecolor=INK if is_wrong else "none",
        linewidth=2,
    )
    axes.add_patch(box)
    ink = INK if fails else "white"
    axes.text(x + SIDE / 2, y + 0.27, "×" if fails else "✓", fontsize=10, color=ink, ha="center", va="center")
    axes.text(x + SIDE / 2, y + 0.1, label, fontsize=6.5, color=ink, ha="center", va="center")


def draw_test(axes: Axes, y: float, test: Outcome, own: int, others: list[int]) -> float:
    """A row of the picture; returns where it ends.   y: of its upper line of cells"""
    axes.text(0, y + 0.24, test.name, fontsize=11, fontweight="bold", color=INK, va="center")
    axes.text(0, y - 0.02, test.what, fontsize=8.5, color=MUTED, va="top", linespacing=1.3)
    x = LEFT
    cell(axes, x, y, "", False, False)
    x += STEP + GROUP
    for form, letter in enumerate("abc"):
        fails = form < test.forms
        cell(axes, x, y, f"{own}{letter}", fails, not fails)
        x += STEP + (GROUP if form in (0, 2) else 0)
    for place, other in enumerate(others):
        line, column = divmod(place, IN_A_LINE)
        fails = other in test.elsewhere
        cell(axes, x + column * STEP, y - line * STEP, str(other), fails, fails)
    return x + IN_A_LINE * STEP


def draw() -> Figure:
    hunts = read_hunts()
    hunt = hunts[HUNT]
    others = [other.id for other in hunts.values() if other.id not in (hunt.id, *hunt.kin)]
    figure = Figure(figsize=(9.6, 3.5))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    for row, test in enumerate(TESTS):
        right = draw_test(axes, (len(TESTS) - 1 - row) * ROW, test, hunt.id, others)
    x, top = LEFT, (len(TESTS) - 1) * ROW
    for name, wanted, cells in [
        ("sound", "must pass", 1),
        ("broken", "must fail", 1),
        ("variants", "must fail", 2),
        ("engines of other hunts", "must pass", 0),
    ]:
        axes.text(x, top + 0.85, name, fontsize=9.5, color=INK)
        axes.text(x, top + 0.58, wanted, fontsize=8.5, color=MUTED)
        x += cells * STEP + GROUP
    axes.set(xlim=(-0.05, right), ylim=(-0.6, top + 1.15), aspect="equal")
    axes.axis("off")
    return figure


if __name__ == "__main__":
    matplotlib.rcParams.update(
        {"svg.hashsalt": "minivllm", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
    )
    draw().savefig(Path(__file__).with_name("picture.svg"), metadata={"Date": None})
