"""Where a result was measured, and the JSON file it goes to."""

import datetime
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def device_name(device: str) -> str:
    """What the device calls itself, "NVIDIA H100 80GB HBM3" say.   device: "cuda", "cpu" or "auto" """
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()}"


def machine(device: str) -> dict[str, str]:
    """Device and versions."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": triton,
    }


def default_path(name: str, device: str) -> Path:
    """benchmarks/results/<name>-<device>-<date>.json"""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return RESULTS / f"{name}-{slug}-{datetime.date.today()}.json"


class Report:
    """The rows of a benchmark, written to its file as they are measured: a run that is cut short leaves them.

    A file that is there already goes on growing, so that a long run can be made in pieces. ValueError when it
    was measured on another machine or with other options.
    """

    def __init__(self, path: Path, benchmark: str, options: dict[str, Any], device: str) -> None:
        self.path = path
        self.content = {
            "benchmark": benchmark,
            "date": str(datetime.date.today()),
            "machine": machine(device),
            "options": options,
            "rows": [],
        }
        if path.exists():
            found = json.loads(path.read_text())
            for key in ("benchmark", "machine", "options"):
                if found.get(key) != self.content[key]:
                    raise ValueError(f"'{path}' has another {key}: {found.get(key)}; give another --json")
            self.content = found

    def add(self, row: dict[str, Any], text: str | None = None) -> None:
        """Print a row, as `text` or entry by entry, and write the file anew."""
        self.content["rows"].append(row)
        print(text or one_line(row), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(scratch, self.path)


def one_line(row: dict[str, Any]) -> str:
    """The plain entries of a row."""
    plain = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
    return "  ".join(
        f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in plain.items()
    )
