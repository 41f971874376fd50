"""`minivllm trace-page`: an engine's steps as one HTML page. Stands for nothing in vLLM (v0.22.1)."""

import json
from pathlib import Path
from typing import Any

from minivllm.commands.common import console
from minivllm.observe.page import build_page, run_of
from minivllm.observe.trace import StepRecord, Trace


def run_trace_page(path: Path, out: Path) -> None:
    """Read a trace, write the page.

    ValueError for a file that is neither the demo's JSON nor lines of step records, or holds no step.
    """
    records, room = read_trace(path)
    if not records:
        raise ValueError(f"'{path}' holds no step; give the file of an engine that has run")
    page = build_page(f"Steps of {path.name}", [run_of(path.stem, records, room)])
    out.write_text(page, encoding="utf-8")
    console.print(f"{len(records)} steps: see {out}", highlight=False, markup=False)


def read_trace(path: Path) -> tuple[list[StepRecord], dict[str, int]]:
    """The records, and what there was room for where the file says it."""
    report = _report(path)
    if report is None:
        return Trace.read_jsonl(path).records, {}
    try:
        return [StepRecord.from_dict(step) for step in report["steps"]], report.get("room", {})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"'{path}' has steps that are no step records: {error}") from error


def _report(path: Path) -> dict[str, Any] | None:
    """What `minivllm demo` wrote; None for a file of another kind."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return report if isinstance(report, dict) and "steps" in report else None
