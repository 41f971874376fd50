"""The pictures of the notebooks, so that their cells hold the idea and not the drawing.

Each function draws one picture and shows it. With `axes` it draws into these, and whoever made them (`picture`) shows
them. What else is given by name goes to `Axes.set`: title, xlabel, ylim, ...
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, cycle, groupby, pairwise

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb, to_rgba

# Okabe and Ito's, which colour-blind readers can distinguish.
SERIES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
COLOURS = {"base": "#9aa0a6", **dict(zip(("json", "sql", "bullets", "dates"), SERIES))}
INK, PALE, OTHERS = "#222222", "#dadce0", ("#c4c8cd", "#e3e5e8")
NO_BOX = {"length": 0, "labelsize": 8}


@contextmanager
def picture(height: float = 3.0, rows: int = 1, columns: int = 1, width: float = 8.0, **options) -> Iterator:
    """Axes to draw into, shown at the end; an array of them where there are several."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), dpi=100, layout="constrained", **options
    )
    yield axes
    plt.show()
    plt.close(figure)


@contextmanager
def _on(axes: Axes | None, height: float) -> Iterator[Axes]:
    if axes is not None:
        yield axes
        return
    with picture(height) as own:
        yield own


def _plain(axes: Axes, *sides: str) -> None:
    axes.spines[list(sides or ("top", "right"))].set_visible(False)


def _runs(values: Sequence) -> Iterator[tuple[object, int, int]]:
    """Each stretch of equal values, where it begins, and where it ends."""
    lengths = [(value, len(list(group))) for value, group in groupby(values)]
    for (value, length), stop in zip(lengths, accumulate(length for _, length in lengths)):
        yield value, stop - length, stop


def lines(curves, x=None, axes=None, *, height=3.0, log="", ticks=None, styles=None, colours=None, **labels):
    """A line for each of `curves`, name -> numbers.

    x        of every number, as many as the longest has; None: 0, 1, 2, ...    ticks   the numbers to write below
    log      "x", "y" or "xy"                          styles  name -> matplotlib's, such as "--" or "o"
    colours  name -> colour; those that have none take the next of SERIES
    """
    with _on(axes, height) as axes:
        for (name, numbers), colour in zip(curves.items(), cycle(SERIES)):
            colour, style = (colours or {}).get(name, colour), (styles or {}).get(name, "o-")
            axes.plot(
                range(len(numbers)) if x is None else x[: len(numbers)],
                numbers,
                style,
                color=colour,
                ms=4,
                label=name,
            )
        axes.set(**{f"{side}scale": "log" for side in log}, **labels)
        if "y" not in log and "ylim" not in labels:
            axes.set_ylim(bottom=0)
        if ticks is not None:
            axes.set_xticks(ticks, ticks)
            axes.minorticks_off()
        if len(curves) > 1:
            beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)} if len(curves) > 4 else {}
            axes.legend(frameon=False, fontsize=9, **beside)
        _plain(axes)


def bars(series, axes=None, *, height=2.4, colours=None, **labels):
    """Bars beside each other: name of a series -> case -> number. With one series its cases may have colours."""
    with _on(axes, height) as axes:
        thick = 0.8 / len(series)
        for line, ((name, numbers), colour) in enumerate(zip(series.items(), SERIES)):
            places = np.arange(len(numbers)) + thick * (line - (len(series) - 1) / 2)
            own = colour if colours is None else [colours[case] for case in numbers]
            axes.barh(places, list(numbers.values()), 0.92 * thick, color=own, label=name)
        axes.set_yticks(range(len(numbers)), list(numbers))
        axes.set_ylim(len(numbers) - 0.5, -0.5)
        axes.set(**labels)
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=9)
        _plain(axes)


def shares(cases, axes=None, *, height=3.0, **labels):
    """One bar a case, made of its parts in percent: case -> part -> percent."""
    with _on(axes, height) as axes:
        parts = list(next(iter(cases.values())))
        left = np.zeros(len(cases))
        for part, colour in zip(parts, cycle(SERIES)):
            percent = np.array([case[part] for case in cases.values()])
            axes.barh(list(cases), percent, left=left, color=colour, label=part)
            left += percent
        for line, total in enumerate(left):
            axes.text(total + 1, line, f"{total:.1f}%", va="center", fontsize=8)
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.set(**labels)
        axes.tick_params(labelsize=8)
        axes.legend(frameon=False, fontsize=8)
        _plain(axes)


def dots(groups, axes=None, *, height=2.4, colours=COLOURS, spread=0.0, marker="o", **labels):
    """A row of dots for each name -> numbers; with `spread` the numbers of a name stand side by side, upright."""
    with _on(axes, height) as axes:
        for place, (name, numbers) in enumerate(groups.items()):
            beside = place + spread * np.linspace(-1, 1, len(numbers))
            across = (beside, numbers) if spread else (numbers, beside)
            axes.plot(*across, marker, color=colours[name], alpha=0.7, ms=4 if spread else 8)
        if spread:
            axes.set_xticks(range(len(groups)), list(groups))
            axes.set_ylim(bottom=0)
        else:
            axes.set_yticks(range(len(groups)), list(groups))
            axes.set_ylim(-0.6, len(groups) - 0.4)
        axes.set(**labels)
        _plain(axes)


def batches(rows_of, axes=None, *, height=1.6, **labels):
    """A box a row, coloured by adapter: name of a batch -> the adapters of its rows."""
    with _on(axes, height) as axes:
        for line, adapters in enumerate(rows_of.values()):
            colours = [COLOURS[name] for name in adapters]
            axes.barh(
                [line] * len(colours), 1, left=range(len(colours)), height=0.7, color=colours, ec="white"
            )
        axes.set_yticks(range(len(rows_of)), list(rows_of))
        axes.invert_yaxis()
        axes.set(xlabel="rows of the batch, coloured by adapter", **labels)
        axes.tick_params(length=0)
        _plain(axes, "top", "right", "left")


def batch_in_tiles(row_adapters, rows_by_slot, tiles, *, height=2.6):
    """A batch as it came above, by slot below, and its tiles: (slot, first place, rows) each."""
    with _on(None, height) as axes:
        place_of = {row: place for place, row in enumerate(rows_by_slot)}
        for row, name in enumerate(row_adapters):
            place, colour = place_of[row], COLOURS[name]
            axes.barh([3, 0], 0.92, left=[row, place], height=0.7, color=colour)
            axes.plot([row + 0.46, place + 0.46], [2.6, 0.4], color=colour, linewidth=0.8, alpha=0.7)
            for x, y in ((row, 3), (place, 0)):
                axes.text(x + 0.46, y, row, ha="center", va="center", fontsize=7, color="white")
        for number, (slot, first, length) in enumerate(tiles):
            if slot >= 0:
                axes.add_patch(plt.Rectangle((first - 0.04, -0.5), length, 1.0, fill=False, linewidth=1.3))
                middle = first + length / 2 - 0.04
                axes.text(middle, -0.85, f"tile {number}", ha="center", va="top", fontsize=8)
        axes.set_yticks([3, 0], ["as it came", "by slot"])
        axes.set(ylim=(-1.5, 3.6), xticks=[])
        axes.tick_params(length=0)
        _plain(axes, "top", "right", "left", "bottom")


def shaded(numbers, owners) -> np.ndarray:
    """(T, N, 3) colours of rows of numbers: the darker, the larger beside the owner's others.

    owners   of each row: an adapter, "base" (plain grey), or None (white)
    """
    sizes, owners = np.abs(np.asarray(numbers, dtype=float)), np.array(owners, dtype=object)
    image = np.ones((*sizes.shape, 3))
    for owner in {owner for owner in owners.tolist() if owner}:
        rows = owners == owner
        largest = max(float(np.quantile(sizes[rows], 0.99)), 1e-9)
        depth = (
            np.full(sizes[rows].shape, 0.45) if owner == "base" else (sizes[rows] / largest).clip(0, 1) ** 0.6
        )
        image[rows] = 1 - depth[..., None] * (1 - np.array(to_rgb(COLOURS[owner])))
    return image


def rows_by_owner(panels, *, height=4.0, columns=None, **labels):
    """Matrices beside each other, shaded in the colours of whose rows they are: title -> (numbers, owners).

    columns   names of stretches of columns -> their widths
    """
    with picture(height, columns=len(panels)) as all_axes:
        for axes, (title, (numbers, owners)) in zip(all_axes, panels.items()):
            count, width = len(owners), np.shape(numbers)[1]
            cells = (
                np.abs(np.asarray(numbers)).reshape(count, width // 4, 4).max(2)
            )  # a pixel is four columns
            extent = (0, width, count, 0)
            axes.imshow(shaded(cells, owners), aspect="auto", interpolation="nearest", extent=extent)
            runs = [(name, a, b) for name, a, b in _runs(owners) if name]
            axes.set_yticks([(a + b) / 2 for _, a, b in runs], [name for name, _, _ in runs])
            axes.hlines([a for _, a, _ in runs if a], 0, width, color="black", linewidth=0.3)
            edges = list(accumulate((columns or {}).values(), initial=0))
            axes.vlines(edges[1:-1], 0, count, color="black", linewidth=0.6)
            axes.set_xticks([(a + b) / 2 for a, b in pairwise(edges)], list(columns or {}))
            axes.set_title(title, fontsize=9)
            axes.tick_params(**NO_BOX)
            axes.set(**labels)


def heatmap(table, axes, colour, rows, **labels):
    """A table of sizes, roots of them drawn so that small ones show; `most` of `labels` is the darkest."""
    most = labels.pop("most", np.max(table))
    white_to = LinearSegmentedColormap.from_list("", ["#ffffff", colour])
    axes.imshow(np.sqrt(table), aspect="auto", cmap=white_to, vmin=0, vmax=most**0.5)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(**NO_BOX)
    axes.set(**labels)


def squares(kinds, colours, axes=None, *, height=3.0, columns=None, rows=None, gaps=True, **labels):
    """A square, or a thin cell, for each number of a table: `colours` by number.    columns, rows   their names"""
    kinds = np.asarray(kinds)
    with _on(axes, height) as axes:
        image = np.array([to_rgb(colour) for colour in colours])[kinds]
        axes.imshow(image, aspect="equal" if gaps else "auto", interpolation="nearest")
        if gaps:
            axes.set_xticks(np.arange(kinds.shape[1] + 1) - 0.5, minor=True)
            axes.set_yticks(np.arange(kinds.shape[0] + 1) - 0.5, minor=True)
            axes.grid(which="minor", color="white", linewidth=1.5)
            _plain(axes, "top", "right", "left", "bottom")
        if columns is not None or gaps:
            axes.set_xticks(range(len(columns or ())), columns or (), rotation=60)
        axes.set_yticks(range(len(rows or ())), rows or ())
        axes.tick_params(which="both", **NO_BOX)
        axes.set_title(labels.pop("title", ""), fontsize=9, loc="left")
        axes.set(**labels)


def tokens_by_step(steps, *, height=2.6, limit=None, **labels):
    """A bar a step, made of its requests' tokens: (adapter, tokens) each, in the order of the batch."""
    with _on(None, height) as axes:
        named = {}
        for step, batch in enumerate(steps):
            tops = accumulate(tokens for _, tokens in batch)
            for (name, tokens), top in zip(batch, tops):
                bar = axes.bar(
                    step, tokens, bottom=top - tokens, color=COLOURS[name], width=0.9, ec="white", lw=0.5
                )
                named.setdefault(name, bar)
        if limit is not None:
            axes.axhline(limit, color=INK, linewidth=1)
        names = [name for name in COLOURS if name in named]
        axes.legend([named[name] for name in names], names, frameon=False, fontsize=8, ncols=len(names))
        tallest = max(limit or 0, *(sum(tokens for _, tokens in batch) for batch in steps))
        axes.set(xlabel="step", ylim=(0, 1.25 * tallest), **labels)
        _plain(axes)


def requests_over_time(panels, adapter_of, *, height=4.0, **labels):
    """A line a request, in its adapter's colour, pale while it waits: title -> [(running ids, waiting ids) a step].

    adapter_of   request id -> adapter, by arrival
    """
    with picture(height, columns=len(panels), sharey=True, sharex=True) as all_axes:
        for axes, (title, steps) in zip(np.atleast_1d(all_axes), panels.items()):
            axes.imshow(lanes(steps, adapter_of), aspect="auto", interpolation="nearest")
            axes.hlines(
                np.arange(len(adapter_of)) + 0.5, -0.5, len(steps) - 0.5, color="white", linewidth=0.8
            )
            axes.set(title=title, xlabel="step", **labels)
        np.atleast_1d(all_axes)[0].set_ylabel("request, by arrival")
        _legend(axes.figure, COLOURS)


def lanes(steps, adapter_of) -> np.ndarray:
    """(requests, steps, 4) colours of `requests_over_time`."""
    lane = {request: place for place, request in enumerate(adapter_of)}
    image = np.ones((len(lane), len(steps), 4))
    for step, (running, waiting) in enumerate(steps):
        for ids, alpha in ((waiting, 0.3), (running, 1)):
            for request in ids:
                image[lane[request], step] = to_rgba(COLOURS[adapter_of[request]], alpha)
    return image


def slots_over_time(history, title, *, named=5, height=4.0):
    """What each slot holds, above, and each place in memory, below, in every step: (slot table, memory) each.

    Memory has what was used longest ago first. Adapters 1 to `named` have colours of their own.
    """
    slots, places = len(history[0][0]), max(len(memory) for _, memory in history)

    def colour(adapter):
        if adapter is None:
            return (1, 1, 1)
        return to_rgb(SERIES[adapter - 1] if adapter <= named else OTHERS[adapter % 2])

    tables = [table for table, _ in history]
    newest_first = [[*reversed(memory), *[None] * places][:places] for _, memory in history]
    with picture(height, rows=2, sharex=True, height_ratios=[slots + 1, places]) as both:
        for axes, columns, label in zip(both, (tables, newest_first), ("slot", "memory")):
            image = np.array([[colour(adapter) for adapter in column] for column in columns]).swapaxes(0, 1)
            axes.imshow(image, aspect="auto", interpolation="nearest")
            axes.hlines(np.arange(len(image)) + 0.5, -0.5, len(history) - 0.5, color="white", linewidth=1)
            axes.set_ylabel(label)
        both[0].set(title=title, yticks=range(slots))
        both[1].set(xlabel="step", yticks=[0, places - 1], yticklabels=["just used", "oldest"])
        names = {f"adapter {i}": SERIES[i - 1] for i in range(1, named + 1)}
        _legend(axes.figure, names | {"others": OTHERS[0]})


def rows_in_requests(rows, legend, *, height=3.0, **labels):
    """A bar a row of a batch, as high as its place in its own request: (adapter, first place, rows, samples) each.

    legend   adapter -> what to say of it
    """
    with _on(None, height) as axes:
        start = 0
        for name, first, count, samples in rows:
            xs, heights = np.arange(start, start + count), np.arange(first, first + count) + 1
            axes.bar(xs, heights, width=0.9, color=COLOURS[name])
            if samples:
                axes.plot(xs[-1], heights[-1] + 3, "o", color=INK, markersize=4)
            start += count
        patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in legend]
        axes.legend(patches, list(legend.values()), frameon=False, loc="upper center")
        axes.set(xlabel="row of the batch", ylabel="place in its request", **labels)
        axes.set_ylim(top=1.15 * axes.get_ylim()[1])
        _plain(axes)


def answers(by_adapter, *, height=2.4, **labels):
    """Answers token by token, the darker the surer: adapter -> [(text, probability)]."""
    with _on(None, height) as axes:
        for line, (name, tokens) in enumerate(by_adapter.items()):
            x = 0
            for text, probability in tokens:
                text, sure = text.replace("\n", "↵") or "■", probability**2
                box = plt.Rectangle((x, line - 0.4), len(text), 0.8, fc=COLOURS[name], alpha=sure, ec="white")
                axes.add_patch(box)
                ink = "white" if sure > 0.6 else INK
                style = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 9, "color": ink}
                axes.text(x + len(text) / 2, line, text.strip(), **style)
                x += len(text)
        axes.set(xlim=(-0.5, 68), ylim=(len(by_adapter) - 0.4, -0.6), xticks=[], **labels)
        axes.set_yticks(range(len(by_adapter)), list(by_adapter))
        axes.tick_params(length=0)
        _plain(axes, "top", "right", "left", "bottom")


def turns(series, *, height=2.0, **labels):
    """What was done when: name -> [(begin, end)], each in the next colour; gaps are white."""
    with _on(None, height) as axes:
        for line, spans in enumerate(series.values()):
            for (begin, end), colour in zip(spans, cycle(SERIES)):
                axes.barh(line, end - begin, left=begin, color=colour, edgecolor="white")
        axes.set_yticks(range(len(series)), list(series))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set(**labels)
        _plain(axes)


def _legend(figure, colours) -> None:
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(patches, list(colours), ncols=6, loc="outside lower center", frameon=False, fontsize=8)
