"""One self-contained HTML page that compares policies: a picture and a table."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from matplotlib.figure import Figure

from minivllm.observe.palette import ADAPTER_COLOURS

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Policies compared</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ccc; }
th:first-child, td:first-child { text-align: left; } td.best { font-weight: bold; } img { max-width: 100%; }
.scroll { overflow-x: auto; } td, th { white-space: nowrap; } p { overflow-wrap: anywhere; }
</style></head><body>
<h1>Policies compared</h1>
<p>{{ said }}</p>
<p>Cost of a step: {{ cost_model }}.</p>
<img alt="Times to first token, tokens a second, memory hits, Jain's index"
 src="data:image/png;base64,{{ picture }}">
<div class="scroll">
<table><thead><tr><th>policy</th>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for title, cells in rows %}<tr><td>{{ title }}</td>{% for cell, best in cells -%}
<td{% if best %} class="best"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
<p>TTFT: ms until the first token. TPOT: ms for each further one. Of both the median, then the 99th percentile.
hits: requests that find their adapter in memory. bound: what Belady's policy, which knows the future, would find.
copies: into slots. Jain: 1 if requests of all adapters get tokens equally fast. $/M: US dollars for a million tokens
of answers. Bold is best.</p>
</body></html>
"""

# Of these more is better; of the others less. What is written alike is marked alike, and nowhere if all are.
MORE_IS_BETTER = ("tokens_per_second", "memory_hits", "memory_hits_bound", "jain")
PANELS = {
    "TTFT, ms (bar: median, line: to the 99th percentile)": "ttft_p50_ms",
    "output tokens a second": "tokens_per_second",
    "share of requests whose adapter is in memory": "memory_hits",
    "Jain's index over adapters": "jain",
}


def build_page(
    result: Mapping[str, Any], titles: Sequence[str], columns: Mapping[str, tuple[str, str]]
) -> str:
    """The page, which loads nothing from elsewhere.   columns: header -> (field of a row, how it is written)"""
    rows = result["rows"]
    marked = {field: _best(field, form, [row[field] for row in rows]) for field, form in columns.values()}
    written = [[(field, form.format(row[field])) for field, form in columns.values()] for row in rows]
    cells = [
        (title, [(text, text == marked[field]) for field, text in row]) for title, row in zip(titles, written)
    ]
    given = {name: value for name, value in result["options"].items() if value is not None}
    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items())
    template = jinja2.Environment(autoescape=True).from_string(TEMPLATE)
    picture = base64.b64encode(draw(rows, titles)).decode()
    return template.render(
        said=said, cost_model=result["cost_model"], picture=picture, columns=columns, rows=cells
    )


def _best(field: str, form: str, values: Sequence[float]) -> str | None:
    """As it is written; None if all values are written alike."""
    if len({form.format(value) for value in values}) < 2:
        return None
    return form.format(max(values) if field in MORE_IS_BETTER else min(values))


def draw(rows: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> bytes:
    """A PNG: one bar a policy, in each of four panels. The same bytes for the same rows."""
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(rows)), layout="constrained")
    places = range(len(rows))
    for axes, (title, field) in zip(figure.subplots(2, 2, sharey=True).flat, PANELS.items()):
        axes.barh(places, [row[field] for row in rows], color=ADAPTER_COLOURS[0])
        if field == "ttft_p50_ms":
            axes.hlines(places, 0, [row["ttft_p99_ms"] for row in rows], color=ADAPTER_COLOURS[5])
        axes.set_yticks(places, titles)
        axes.set_title(title, fontsize=9)
    figure.axes[0].set_ylim(len(rows) - 0.5, -0.5)  # the first on top, in all of them
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()
