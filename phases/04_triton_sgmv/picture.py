"""Draws picture.svg: a batch, its tile list, and the programs of the two launches."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minivllm.gpu.sgmv.lora_kernel_metadata import build_tiles

COLOURS = {"base": "#9aa0a6", "json": "#0072B2", "sql": "#E69F00", "bullets": "#009E73", "dates": "#CC79A7"}
SLOTS = ["json", "sql", "bullets", "dates"]
REQUESTS = [("sql", 6), ("base", 3), ("dates", 1), ("json", 5), ("sql", 1), ("base", 1), ("dates", 7)]
BLOCK_ROWS, CAPACITY, SPLITS = 4, 10, 3
COLUMN_BLOCKS = ["q", "q", "q", "q", "q", "k", "k", "v", "v"]  # 576, 192 and 192 columns in blocks of 128
LEFT, WIDTH, CELL = 4.2, 26.0, 0.62
ROWS_AT, SORTED_AT, SHRINK_AT, EXPAND_AT = 0.0, 3.2, 6.8, 10.9  # from above


def draw() -> None:
    plt.rcParams.update({"svg.hashsalt": "minivllm", "font.family": "DejaVu Sans", "font.size": 9})
    token_slots = [-1 if name == "base" else SLOTS.index(name) for name, n in REQUESTS for _ in range(n)]
    rows, tiles = build_tiles(torch.tensor(token_slots), len(SLOTS), CAPACITY, BLOCK_ROWS)
    figure, axes = plt.subplots(figsize=(9.6, 5.8))
    axes.set_xlim(0, LEFT + WIDTH + 4.6)
    axes.set_ylim(EXPAND_AT + len(COLUMN_BLOCKS) * CELL + 0.3, -0.9)
    axes.axis("off")
    draw_batch(axes, token_slots, rows.tolist())
    draw_tiles(axes, tiles.t().tolist())
    draw_titles(axes)
    figure.savefig(
        Path(__file__).with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight", pad_inches=0.05
    )
    plt.close(figure)


def colour_of(slot: int) -> str:
    return COLOURS[SLOTS[slot]] if slot >= 0 else COLOURS["base"]


def draw_batch(axes: Axes, token_slots: list[int], rows: list[int]) -> None:
    """Rows as they came, and the same rows by slot."""
    for row, slot in enumerate(token_slots):
        place = rows.index(row)
        for x, y, alpha in ((row, ROWS_AT, 1.0), (place, SORTED_AT, 1.0 if slot >= 0 else 0.4)):
            axes.add_patch(Rectangle((LEFT + x, y), 0.92, 0.8, facecolor=colour_of(slot), alpha=alpha))
            axes.text(LEFT + x + 0.46, y + 0.42, row, ha="center", va="center", fontsize=7, color="white")
        axes.plot(
            [LEFT + row + 0.46, LEFT + place + 0.46],
            [ROWS_AT + 0.85, SORTED_AT - 0.12],
            color=colour_of(slot),
            linewidth=0.9,
            alpha=0.7,
        )


def draw_tiles(axes: Axes, tiles: list[list[int]]) -> None:
    """A box for each tile, and below it a column of programs in either launch."""
    for tile, (slot, first, length) in enumerate(tiles):
        is_used = slot >= 0
        column = LEFT + tile * (WIDTH - 2) / CAPACITY + 0.5
        if is_used:
            box = Rectangle((LEFT + first - 0.04, SORTED_AT - 0.1), length, 1.0, fill=False, linewidth=1.4)
            axes.add_patch(box)
            axes.plot(
                [LEFT + first + length / 2 - 0.04, column + CELL],
                [SORTED_AT + 0.92, SHRINK_AT - 1.3],
                color="#5f6368",
                linewidth=0.7,
            )
        title = f"tile {tile}\nslot {slot}" if is_used else "slot −1"
        axes.text(column + CELL, SHRINK_AT - 0.12, title, ha="center", va="bottom", fontsize=7.5)
        for top, programs in ((SHRINK_AT, SPLITS), (EXPAND_AT, len(COLUMN_BLOCKS))):
            for program in range(programs):
                style = {"facecolor": colour_of(slot), "alpha": 0.85} if is_used else {"facecolor": "#e8eaed"}
                axes.add_patch(Rectangle((column, top + program * CELL), 2 * CELL, CELL * 0.86, **style))


def draw_titles(axes: Axes) -> None:
    right = LEFT + WIDTH - 1.4
    for y, text in ((ROWS_AT, "rows as\nthey came"), (SORTED_AT, "rows by slot,\ncut into tiles")):
        axes.text(LEFT - 0.4, y + 0.42, text, ha="right", va="center")
    for top, size, title in ((SHRINK_AT, SPLITS, "shrink"), (EXPAND_AT, len(COLUMN_BLOCKS), "expand")):
        axes.text(LEFT - 0.4, top + size * CELL / 2, title, ha="right", va="center", weight="bold")
    for split in range(SPLITS):
        y = SHRINK_AT + (split + 0.45) * CELL
        axes.text(right, y, f"split {split} of K", va="center", fontsize=8)
    for block, part in enumerate(COLUMN_BLOCKS):
        y = EXPAND_AT + (block + 0.45) * CELL
        nth = COLUMN_BLOCKS[:block].count(part)
        axes.text(right, y, f"{part}, columns {128 * nth} …", va="center", fontsize=8)
    y = SHRINK_AT + SPLITS * CELL + 0.45
    axes.text(
        LEFT + 0.5, y, "h: a plane of partial sums for each split, (3, 3, T, R)", va="center", fontsize=8
    )
    axes.annotate(
        "",
        (LEFT + 20.0, EXPAND_AT - 0.2),
        (LEFT + 20.0, SHRINK_AT + SPLITS * CELL + 0.1),
        arrowprops={"arrowstyle": "->", "color": "#5f6368"},
    )
    y = EXPAND_AT - 0.6
    axes.text(
        LEFT + 0.5,
        y,
        "the planes are summed, times B, added to the tile's rows of y",
        va="center",
        fontsize=8,
    )


if __name__ == "__main__":
    draw()
