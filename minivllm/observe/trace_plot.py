"""The picture of a step trace: slots, requests and queue over time. Stands for nothing in vLLM (v0.22.1)."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from minivllm.observe.palette import BASE_COLOUR, adapter_colours
from minivllm.observe.trace import Trace

WAITING_COLOUR = "#D9D9D9"
SKIPPED_COLOUR = "#5A5A5A"
RUNNING_COLOUR = "#0072B2"
INK = "#222222"
PALE = 0.35
MAX_NAMED_REQUESTS = 40


def draw_trace(trace: Trace, path: str | Path, title: str = "One engine, many adapters") -> None:
    """Write the picture of a trace; the ending of `path` picks the format (png, svg, pdf).

    Above, what is in the slots; in the middle, a line per request with the colour of its adapter; below, how
    many wait. Raises ValueError if the trace is empty.
    """
    if not trace.records:
        raise ValueError("the trace holds no step; run the engine before drawing")
    requests = _requests_in_order(trace)
    num_slots = max(len(record.slots) for record in trace.records)
    heights = [max(1.0, 0.42 * num_slots), min(9.0, max(1.2, 0.2 * len(requests))), 1.3]
    figure = Figure(figsize=(13, sum(heights) + 2.6), dpi=110, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(h_pad=0.06, hspace=0.02)
    slots, rows, queue = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    colours = adapter_colours(trace.adapters)
    _draw_slots(slots, trace, colours, num_slots)
    _draw_requests(rows, trace, colours, requests)
    _draw_queue(queue, trace)
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.01, 0.995 - 0.36 / figure.get_figheight(), _subtitle(trace), va="top", color="#555555")
    _draw_legend(figure, colours)
    figure.savefig(path)


def _subtitle(trace: Trace) -> str:
    counts = trace.summary()
    names = ("steps", "requests", "adapters", "tokens", "loads", "evictions", "skips", "preemptions")
    said = [f"{counts[name]:,} {name[:-1] if counts[name] == 1 else name}" for name in names]
    if counts["steps_left_out"]:
        said.append(f"{counts['steps_left_out']:,} steps before these are left out")
    return "  ·  ".join(said)


def _requests_in_order(trace: Trace) -> list[str]:
    """Every request, in the order in which the trace first names it."""
    names: dict[str, None] = {}
    for record in trace.records:
        names.update(dict.fromkeys(row.request for row in record.rows))
        names.update(dict.fromkeys(record.waiting + record.preempted))
    return list(names)


def _runs(values: list) -> Iterator[tuple[int, int, object]]:
    """Stretches of equal values, as (start, length, value); None is a gap."""
    start = 0
    for value, group in groupby(values):
        length = len(list(group))
        if value is not None:
            yield start, length, value
        start += length


def _bar(axes: Axes, start: float, y: float, length: float, height: float, **style: object) -> None:
    axes.add_patch(Rectangle((start - 0.5, y - height / 2), length, height, **style))


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _text_colour(colour: str, alpha: float) -> str:
    """White on a dark colour, dark on a light one."""
    red, green, blue = (alpha * part + 1 - alpha for part in to_rgb(colour))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


def _draw_slots(axes: Axes, trace: Trace, colours: dict, num_slots: int) -> None:
    """One lane a slot: full colour in steps that use the adapter, pale while it only sits there."""
    for slot in range(num_slots):
        held = [record.slots[slot] if slot < len(record.slots) else None for record in trace.records]
        shade = [1.0 if any(row.slot == slot for row in record.rows) else PALE for record in trace.records]
        pinned = [a if a in record.pinned else None for a, record in zip(held, trace.records)]
        _bar(axes, 0, slot, len(trace), 0.8, facecolor="#F4F4F4", linewidth=0)
        for start, length, (adapter, alpha) in _runs([a and (a, alpha) for a, alpha in zip(held, shade)]):
            _bar(axes, start, slot, length, 0.8, facecolor=colours[adapter], alpha=alpha, linewidth=0)
        for start, length, adapter in _runs(held):
            if length * 95 > len(adapter) * len(trace):
                style = {"color": _text_colour(colours[adapter], shade[start]), "fontweight": "bold"}
                offset = {"xytext": (9, 0), "textcoords": "offset points"}
                axes.annotate(adapter, (start - 0.5, slot), va="center", fontsize=9, **offset, **style)
        for start, length, _ in _runs(pinned):
            _bar(axes, start, slot, length, 0.8, fill=False, edgecolor=INK, linewidth=1.6)
    _mark_slot_events(axes, trace)
    axes.set_ylim(num_slots - 0.45, -0.65)
    axes.set_yticks(range(num_slots), [f"slot {slot}" for slot in range(num_slots)])
    held = "which adapter each one holds (pale: not used in that step)"
    _finish(axes, f"Slots: {held if num_slots else 'none, the engine serves the base model only'}")


def _mark_slot_events(axes: Axes, trace: Trace) -> None:
    style = {"color": INK, "markeredgecolor": "white", "clip_on": False}
    for x, record in enumerate(trace.records):
        for event in record.evictions:
            axes.plot(x - 0.5, event.slot, "X", markersize=8, **style)
        for event in record.activations:
            if event.adapter in record.loads:
                axes.plot(x - 0.5, event.slot - 0.4, "v", markersize=8, **style)


def _draw_requests(axes: Axes, trace: Trace, colours: dict, requests: list[str]) -> None:
    """One lane a request: prefill hatched, decode plain, waiting a thin line."""
    lane = {request: y for y, request in enumerate(requests)}
    cells: list[list] = [[None] * len(trace) for _ in requests]
    waits: list[list] = [[None] * len(trace) for _ in requests]
    for x, record in enumerate(trace.records):
        for row in record.rows:
            cells[lane[row.request]][x] = (row.adapter, row.kind != "decode")
        skipped = {skip.request for skip in record.skipped}
        for request in record.waiting:
            waits[lane[request]][x] = SKIPPED_COLOUR if request in skipped else WAITING_COLOUR
        for request in record.preempted:
            axes.plot(x - 0.5, lane[request], "D", color=INK, markeredgecolor="white", markersize=6, zorder=3)
    named = len(requests) <= MAX_NAMED_REQUESTS
    for y in range(len(requests)):
        for start, length, colour in _runs(waits[y]):
            axes.hlines(y, start - 0.5, start + length - 0.5, color=colour, linewidth=2.4 if named else 1)
        for start, length, (adapter, prefill) in _runs(cells[y]):
            hatch = {"hatch": "//////", "edgecolor": "white"} if prefill else {}
            _bar(axes, start, y, length, 0.78, facecolor=colours[adapter], linewidth=0, **hatch)
    axes.set_ylim(len(requests) - 0.3, -0.7)
    axes.set_yticks(range(len(requests)) if named else [], [f"{name:.16}" for name in requests if named])
    unnamed = any(record.more_waiting for record in trace.records)
    note = " (of a long queue only the first are drawn)" if unnamed else ""
    _finish(
        axes, f"Requests, in order of arrival: every column is one forward pass over all its colours{note}"
    )


def _draw_queue(axes: Axes, trace: Trace) -> None:
    edges = [x - 0.5 for x in range(len(trace) + 1)]
    waiting = [record.num_waiting for record in trace.records]
    skipped = [record.num_skipped for record in trace.records]
    axes.stairs(waiting, edges, fill=True, color=WAITING_COLOUR)
    axes.stairs(skipped, edges, fill=True, color=SKIPPED_COLOUR)
    axes.stairs(
        [record.running for record in trace.records],
        edges,
        color=RUNNING_COLOUR,
        linewidth=1.6,
        baseline=None,
    )
    axes.set_xlim(-0.5, len(trace) - 0.5)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.xaxis.set_major_formatter(
        lambda x, _: str(trace.records[int(x)].step) if 0 <= x < len(trace) else ""
    )
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    _finish(axes, "Queue: how many wait, how many of them are passed over, how many run")


def _draw_legend(figure: Figure, colours: dict) -> None:
    adapters = [Patch(facecolor=colour, label=name) for name, colour in colours.items() if name]
    mark = {"linestyle": "", "color": INK, "markeredgecolor": "white", "markersize": 8}
    marks = [
        Patch(facecolor=BASE_COLOUR, label="base model"),
        Patch(facecolor="#BBBBBB", edgecolor="white", hatch="//////", label="prompt (prefill, chunks)"),
        Line2D([], [], color=WAITING_COLOUR, linewidth=3, label="waiting"),
        Line2D([], [], color=SKIPPED_COLOUR, linewidth=3, label="passed over"),
        Line2D([], [], color=RUNNING_COLOUR, linewidth=1.6, label="running"),
        Line2D([], [], marker="v", label="read from disk", **mark),
        Line2D([], [], marker="X", label="evicted", **mark),
        Line2D([], [], marker="D", label="preempted", **{**mark, "markersize": 6}),
        Patch(fill=False, edgecolor=INK, linewidth=1.6, label="pinned"),
    ]
    figure.legend(handles=adapters + marks, loc="outside lower left", ncols=7, frameon=False, fontsize=8.5)
