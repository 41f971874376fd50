"""One self-contained HTML page that shows steps of an engine. Stands for nothing in vLLM (v0.22.1)."""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from minivllm.observe.palette import ADAPTER_COLOURS, BASE_COLOUR
from minivllm.observe.trace import StepRecord

SCRIPTS = ("trace.js", "charts.js", "page.js")

Step = StepRecord | Mapping[str, Any]


def run_of(name: str, steps: Iterable[Step], room: Mapping[str, int] | None = None) -> dict[str, Any]:
    """An engine's steps in the form that the page takes.

    steps   records, or dicts from `asdict`; with `tokens`, request -> id, and `error` where there are any
    room    the engine's capacities, from `minivllm.observe.recorder.room`
    """
    plain = [asdict(step) if isinstance(step, StepRecord) else dict(step) for step in steps]
    return {"name": name, "steps": plain, "room": dict(room or {})}


def build_page(
    title: str, runs: Sequence[Mapping[str, Any]], scripts: Sequence[str] = (), **more: Any
) -> str:
    """The page: style, scripts and data are in it, and it loads nothing but from its own server.

    runs      from `run_of`; two of them are shown side by side
    scripts   further files of this folder, after those that every page has
    more      what else `page.js` reads: columns, differs, difference, verdict, notes, live
    """
    data = {"title": title, "runs": runs, "palette": ADAPTER_COLOURS, "base_colour": BASE_COLOUR, **more}
    style, script = _read("style.css"), "\n".join(map(_read, (*SCRIPTS, *scripts)))
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    # Without any `<` the data cannot end its element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"policy": policy, "title": escape(title), "style": style, "script": script, "data": text}
    head, *pieces = _read("index.html").split("@")
    return head + "".join(parts.get(piece, piece) for piece in pieces)


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The hash of an element's text in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
