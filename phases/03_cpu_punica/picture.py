"""Draws picture.svg: one mixed batch on its way through a wrapped qkv linear."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minivllm.lora.mapping import compute_runs, slots_of

COLOURS = {"base": "#9aa0a6", "json": "#0072B2", "sql": "#E69F00", "bullets": "#009E73", "dates": "#CC79A7"}
NAMES = list(COLOURS)  # an adapter's id is its place here, 0 is base
BATCH = {"base": 3, "json": 5, "sql": 4, "dates": 4}  # rows of each, in the order of adapters
SLOT_TABLE = [4, 1, 3, 2]  # adapter id in each slot
TOUCHED = {"json": "qkv", "sql": "qkv", "dates": "qv"}
SLICES = {"q": 576, "k": 192, "v": 192}
X, A, H, B, Y = 5.2, 9.6, 15.6, 18.4, 23.4  # left edges of the five matrices


def draw() -> None:
    plt.rcParams.update({"svg.hashsalt": "minivllm", "font.family": "DejaVu Sans", "font.size": 9})
    ids = [NAMES.index(name) for name, rows in BATCH.items() for _ in range(rows)]
    slots = slots_of(tuple(ids), SLOT_TABLE)
    figure, axes = plt.subplots(figsize=(9.6, 4.7))
    axes.set_xlim(-0.3, 31.6)
    axes.set_ylim(len(ids) + 2.3, -2.4)
    axes.axis("off")

    draw_rows(axes, ids, slots)
    draw_slots(axes, len(ids))
    draw_output(axes, ids)
    for slot, rows in compute_runs(slots):
        draw_run(axes, slot, rows, len(ids))
    for x, width, title, shape in (
        (X, 3.2, "x", "(T, 576)"),
        (A, 4.2, "A of each slot", "3 × (S, 1, R, 576)"),
        (H, 1.4, "h", "(3, T, R)"),
        (B, 3.2, "B of each slot", "3 × (S, 1, N, R)"),
        (Y, 7.7, "y = base output + update", "(T, 960)"),
    ):
        axes.text(x + width / 2, -1.5, title, ha="center", weight="bold")
        axes.text(x + width / 2, -0.45, shape, ha="center", fontsize=8)
    axes.text((X + H) / 2 + 0.5, len(ids) + 1.6, "shrink", ha="center", style="italic")
    axes.text((H + Y) / 2 + 0.7, len(ids) + 1.6, "expand, added", ha="center", style="italic")
    figure.savefig(
        Path(__file__).with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight", pad_inches=0.05
    )
    plt.close(figure)


def draw_rows(axes: Axes, ids: list[int], slots: list[int]) -> None:
    """The rows of the batch: what the mapping calls them, what the kernels call them, and their x."""
    for x, title in ((0.55, "adapter"), (2.5, "id"), (3.9, "slot")):
        axes.text(x, -0.45, title, ha="center", fontsize=8)
    for row, (number, slot) in enumerate(zip(ids, slots)):
        colour = COLOURS[NAMES[number]]
        for x, text in ((2.5, str(number)), (3.9, str(slot).replace("-", "−"))):
            axes.text(x, row + 0.55, text, ha="center", va="center", fontsize=7.5, color="#333333")
        if row == ids.index(number):
            middle = row + BATCH[NAMES[number]] / 2
            name = f"{NAMES[number]}\n(None)" if number == 0 else NAMES[number]
            axes.text(0.55, middle, name, ha="center", va="center", color=colour, weight="bold")
        axes.add_patch(Rectangle((X, row), 3.2, 0.92, facecolor=colour, alpha=0.45 if number else 0.3))


def slot_top(slot: int, rows: int) -> float:
    return slot * rows / len(SLOT_TABLE) + 0.6


def draw_slots(axes: Axes, rows: int) -> None:
    """The buffers: one A and one B a slot; an adapter without rows in the batch is not read."""
    for slot, number in enumerate(SLOT_TABLE):
        name, top = NAMES[number], slot_top(slot, rows)
        is_used = name in BATCH
        style = {
            "facecolor": COLOURS[name] if is_used else "white",
            "edgecolor": COLOURS[name],
            "alpha": 0.85 if is_used else 1,
            "linestyle": "-" if is_used else "--",
        }
        axes.add_patch(Rectangle((A, top), 4.2, 1.9, **style))
        axes.add_patch(Rectangle((B + 0.9, top - 0.45), 1.4, 2.8, **style))
        label = f"slot {slot}: {name}"
        axes.text(A + 2.1, top + 0.98, label, ha="center", va="center", fontsize=8, color="black")


def draw_run(axes: Axes, slot: int, rows: slice, total: int) -> None:
    """Lines from a run's x to its slot's A, to its h, to its slot's B, to its rows of y."""
    name = NAMES[SLOT_TABLE[slot]]
    middle, at_slot = (rows.start + rows.stop) / 2, slot_top(slot, total) + 0.95
    axes.add_patch(
        Rectangle((H, rows.start), 1.4, rows.stop - rows.start - 0.08, facecolor=COLOURS[name], alpha=0.85)
    )
    for start, end in (
        ((X + 3.2, middle), (A, at_slot)),
        ((A + 4.2, at_slot), (H, middle)),
        ((H + 1.4, middle), (B + 0.9, at_slot)),
        ((B + 2.3, at_slot), (Y, middle)),
    ):
        axes.annotate(
            "", end, start, arrowprops={"arrowstyle": "->", "color": COLOURS[name], "linewidth": 1.4}
        )


def draw_output(axes: Axes, ids: list[int]) -> None:
    """y: grey is the base output, colour where the row's adapter adds to it."""
    scale, left = 7.7 / sum(SLICES.values()), Y
    for part, width in SLICES.items():
        for row, number in enumerate(ids):
            axes.add_patch(Rectangle((left, row), width * scale - 0.08, 0.92, facecolor="#9aa0a6", alpha=0.3))
            if part in TOUCHED.get(NAMES[number], ""):
                colour = COLOURS[NAMES[number]]
                axes.add_patch(
                    Rectangle((left, row), width * scale - 0.08, 0.92, facecolor=colour, alpha=0.6)
                )
        axes.text(left + width * scale / 2, len(ids) + 0.65, part, ha="center", fontsize=8)
        left += width * scale
    axes.text(H + 0.7, 1.5, "no h", ha="center", va="center", fontsize=8, color="#5f6368")


if __name__ == "__main__":
    draw()
