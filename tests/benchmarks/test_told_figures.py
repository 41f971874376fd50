"""Figures that README tells are those of docs/speed.md, and where a run left a record, the record's."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, SPEED = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/speed.md"))
FIGURE = re.compile(r"\d[\d,]*")


def row(page: str, first: str) -> list[int]:
    """Numbers of the first table row that begins with this cell, without what is in brackets."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {first}"))
    plain = re.sub(r"\([^)]*\)", "", line.removeprefix(f"| {first}"))
    return [int(figure.replace(",", "")) for figure in FIGURE.findall(plain)]


def test_the_table_beside_vllm_is_that_of_the_page_on_speed():
    for requests in ("1 |", "32 |", "128 |"):
        told = row(README, requests)

        assert told == row(SPEED, requests)
        assert len(told) >= 2


def test_the_figures_of_a_cpu_are_the_records_and_the_pages():
    record = json.loads((ROOT / "benchmarks" / "results" / "cpu-2026-11-21.json").read_text())
    figures = record["tokens_per_second"]
    rows = {
        "eight requests, base model": ("minivllm base x8", "transformers base x8"),
        "eight requests over four adapters and base": ("minivllm mixed x8", "PEFT mixed x8"),
        "one request, base model": ("minivllm base x1", "transformers base x1"),
        "one request, one adapter": ("minivllm one adapter x1", "PEFT one adapter x1"),
    }
    xeon = SPEED.partition("Intel Xeon")[2]
    for name, runs in rows.items():
        epyc, other = row(README, name)[:2], row(README, name)[2:]

        assert epyc == [round(figures[run]) for run in runs]
        assert other == row(xeon, name)[:2]
