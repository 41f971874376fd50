"""The life of a request: `python docs/pictures/life_of_a_request.py` draws docs/_static/life-of-a-request.svg."""

from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BLUE, ORANGE, GREY, INK, MUTED = "#0072B2", "#B86E00", "#9aa0a6", "#202124", "#5f6368"
OUT = Path(__file__).resolve().parents[1] / "_static" / "life-of-a-request.svg"
WIDTH, HEIGHT, STEP = 4.9, 1.4, 1.9
B, A = 0.0, 5.7  # where the books' columns begin


class Box(NamedTuple):
    """A stop on the way: its column and row, what is called, in which file, and what that does."""

    left: float
    row: int
    colour: str
    title: str
    file: str
    does: str


BOXES = {
    "add": Box(B, 0, ORANGE, "1  add_request", "engine/llm_engine.py", "refuses what cannot be served"),
    "check": Box(A, 0, BLUE, "AdapterSource.check", "lora/loading.py", "a new one: config and shapes"),
    "schedule": Box(B, 1, ORANGE, "2  schedule", "core/scheduler.py", "tokens, KV blocks, max_loras"),
    "prepare": Box(
        A, 1, BLUE, "3  prepare_adapters", "lora/worker_manager.py", "read; layers accept or refuse"
    ),
    "launch": Box(B, 2, ORANGE, "4  launch_model", "worker/model_runner.py", "all tokens in one pass"),
    "active": Box(
        A, 2, BLUE, "set_active_adapters", "worker_manager.py, slots.py", "copies, then ids to slots"
    ),
    "sample": Box(B, 3, ORANGE, "5  sample_tokens", "worker/row_sampler.py", "a token for rows at their end"),
    "linear": Box(
        A, 3, BLUE, "every wrapped linear", "lora/layers/, backend.py", "y = x·Wᵀ + (x·Aᵀ)·Bᵀ, by row"
    ),
    "update": Box(B, 4, ORANGE, "6  update_from_output", "core/scheduler.py", "commits; the next step is 2"),
    "output": Box(A, 4, GREY, "RequestOutput", "engine/outputs.py", "text so far, or the end"),
}
ARROWS = (
    ("add", "check"),
    ("add", "schedule"),
    ("schedule", "prepare"),
    ("prepare", "launch"),
    ("launch", "active"),
    ("active", "linear"),
    ("linear", "sample"),
    ("sample", "update"),
    ("update", "output"),
)
# What is plugged in or stands around: folder or file, and what is in it.
AROUND = (
    ("options/", "experts, head, bias, ..."),
    ("sources/", "hub, resolvers, .bin"),
    ("gpu/", "kernels, graphs, pages"),
    ("ahead/", "one step of lookahead"),
    ("parallel/", "several ranks"),
    ("serving/, observe/", "threads; metrics, trace"),
)


def bottom(row: float) -> float:
    return -row * STEP - HEIGHT


def frame(
    axes: Axes, left: float, low: float, width: float, height: float, colour: str, **more: object
) -> None:
    style = "round,pad=0,rounding_size=0.16"
    axes.add_patch(FancyBboxPatch((left, low), width, height, boxstyle=style, edgecolor=colour, **more))


def draw_box(axes: Axes, box: Box) -> None:
    low = bottom(box.row)
    frame(axes, box.left, low, WIDTH, HEIGHT, box.colour, facecolor=box.colour + "1a", lw=1.4)
    axes.text(box.left + 0.2, low + 1.05, box.title, va="center", fontsize=11, weight="bold", color=INK)
    axes.text(
        box.left + 0.2,
        low + 0.66,
        box.file,
        va="center",
        fontsize=9.5,
        color=MUTED if box.colour == GREY else box.colour,
    )
    axes.text(box.left + 0.2, low + 0.28, box.does, va="center", fontsize=9.5, color=INK)


def draw_arrow(axes: Axes, start: str, end: str) -> None:
    """Between the sides of two boxes that face each other."""
    one, other = BOXES[start], BOXES[end]
    middle = HEIGHT / 2
    if one.left == other.left:
        tail, head = (one.left + 0.9, bottom(one.row)), (one.left + 0.9, bottom(other.row) + HEIGHT)
    elif one.left < other.left:
        tail, head = (one.left + WIDTH, bottom(one.row) + middle), (other.left, bottom(other.row) + middle)
    else:
        tail, head = (one.left, bottom(one.row) + middle), (other.left + WIDTH, bottom(other.row) + middle)
        if one.row != other.row:
            tail, head = (one.left, bottom(one.row) + 0.3), (other.left + WIDTH, bottom(other.row) + 1.1)
    style = {"arrowstyle": "-|>", "mutation_scale": 12, "color": INK, "lw": 1.2, "shrinkA": 1, "shrinkB": 1}
    axes.add_patch(FancyArrowPatch(tail, head, **style))


def draw_around(axes: Axes, top: float) -> float:
    """What is around the core, in three columns; gives the lower edge."""
    axes.text(B, top - 0.1, "around the core", fontsize=11, weight="bold", color=MUTED, va="center")
    axes.text(
        B + 3.0,
        top - 0.1,
        "handed in by assembly.py",
        fontsize=9.5,
        color=MUTED,
        va="center",
    )
    width, height = 3.4, 0.95
    for i, (name, what) in enumerate(AROUND):
        left, low = (i % 3) * (width + 0.2), top - 0.5 - height - (i // 3) * (height + 0.2)
        frame(axes, left, low, width, height, GREY, facecolor="none", lw=1.1, ls=(0, (4, 2)))
        axes.text(left + 0.15, low + 0.64, name, va="center", fontsize=9.5, color=INK, weight="bold")
        axes.text(left + 0.15, low + 0.27, what, va="center", fontsize=9.5, color=INK)
    return top - 0.5 - 2 * height - 0.2


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "life-of-a-request", "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(figsize=(6.4, 7.6))
    for left, name, where, colour in (
        (B, "book B", "core/, worker/, engine/", ORANGE),
        (A, "book A", "lora/", BLUE),
    ):
        axes.text(left, 0.4, name, fontsize=11, weight="bold", color=colour, va="center")
        axes.text(left + 1.5, 0.4, where, fontsize=9.5, color=colour, va="center")
    for box in BOXES.values():
        draw_box(axes, box)
    for start, end in ARROWS:
        draw_arrow(axes, start, end)
    low = draw_around(axes, bottom(4) - 0.55)
    axes.set_xlim(-0.1, A + WIDTH + 0.1)
    axes.set_ylim(low - 0.1, 0.75)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(OUT, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
