"""The life of a request: `python docs/pictures/life_of_a_request.py` draws docs/_static/life-of-a-request.svg."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GREEN, GREY, INK = "#0072B2", "#E69F00", "#009E73", "#9aa0a6", "#202124"
OUT = Path(__file__).resolve().parents[1] / "_static" / "life-of-a-request.svg"

# (left, bottom, width, colour, title, lines)
BOXES = {
    "add": (
        0.0,
        8.6,
        4.4,
        GREY,
        "add_request",
        ["prompt -> token ids", "adapter: known? fits?", "a bad one is refused here"],
    ),
    "schedule": (
        0.0,
        5.7,
        4.4,
        ORANGE,
        "Scheduler.schedule",
        ["running first, then waiting", "token budget, KV blocks", "max_loras: skip, never block"],
    ),
    "claim": (
        5.6,
        8.6,
        5.2,
        BLUE,
        "set_active_adapters",
        ["claim what the step needs", "(just read, if not in memory)", "evict, copy into slots"],
    ),
    "mapping": (
        5.6,
        5.7,
        5.2,
        BLUE,
        "set_adapter_mapping",
        ["then: ids -> slots", "memo keyed on slots, too", "tile list of the step"],
    ),
    "linear": (
        12.0,
        8.6,
        5.0,
        GREEN,
        "every wrapped linear",
        ["y = x·Wᵀ", "h = x·Aᵀ  (shrink)", "y += h·Bᵀ  (expand)"],
    ),
    "sample": (
        12.0,
        5.7,
        5.0,
        GREEN,
        "logits, sampler",
        ["rows that end a prompt", "or an answer so far", "one token each"],
    ),
    "update": (
        5.6,
        2.8,
        5.2,
        ORANGE,
        "update_from_output",
        ["commit computed tokens", "who ended frees blocks", "and perhaps a slot"],
    ),
    "output": (
        0.0,
        2.8,
        4.4,
        GREY,
        "RequestOutput",
        ["text so far, or the end", "or: error, with a sentence"],
    ),
}
ARROWS = [
    ("add", "schedule"),
    ("schedule", "claim"),
    ("claim", "mapping"),
    ("mapping", "linear"),
    ("linear", "sample"),
    ("sample", "update"),
    ("update", "output"),
    ("update", "schedule"),
]
HEIGHT = 2.1


def box(
    axes: Axes, left: float, bottom: float, width: float, colour: str, title: str, lines: list[str]
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom),
            width,
            HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.18",
            facecolor=colour + "1f",
            edgecolor=colour,
            lw=1.4,
        )
    )
    axes.text(left + 0.25, bottom + HEIGHT - 0.32, title, va="top", fontsize=10.5, weight="bold", color=INK)
    axes.text(
        left + 0.25,
        bottom + HEIGHT - 0.86,
        "\n".join(lines),
        va="top",
        fontsize=9,
        color=INK,
        linespacing=1.35,
    )


def ends(start: str, end: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow leaves one box and meets the other: sides that face each other."""
    (x0, y0, w0, *_), (x1, y1, w1, *_) = BOXES[start], BOXES[end]
    if x0 == x1:
        return ((x0 + w0 / 2, y0), (x1 + w1 / 2, y1 + HEIGHT))
    if x1 > x0:
        return ((x0 + w0, y0 + HEIGHT / 2), (x1, y1 + HEIGHT / 2))
    return ((x0, y0 + HEIGHT / 2), (x1 + w1, y1 + HEIGHT / 2))


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "life-of-a-request", "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(figsize=(10.4, 5.4))
    for values in BOXES.values():
        box(axes, *values)
    for start, end in ARROWS:
        tail, head = ends(start, end)
        axes.annotate(
            "",
            head,
            tail,
            arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 2, "shrinkB": 2},
        )
    for x, name, colour in (
        (0.0, "engine, scheduler", ORANGE),
        (5.6, "adapters and slots", BLUE),
        (12.0, "one forward pass", GREEN),
    ):
        axes.text(x, 11.1, name, fontsize=10.5, color=colour, weight="bold")
    axes.text(5.6, 2.2, "the next step begins at Scheduler.schedule", fontsize=9, color=INK, style="italic")
    axes.set_xlim(-0.2, 17.2)
    axes.set_ylim(1.9, 11.6)
    axes.axis("off")
    figure.savefig(OUT, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
