"""docs/names.md: what documents about vLLM name is where the page says, or is not here for a reason."""

import importlib
import re
from pathlib import Path

import pytest

import minivllm.vllm  # noqa: F401

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "names.md").read_text(encoding="utf-8")
LINES = [
    line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| in documents")
]
ROWS = [[cell.strip() for cell in re.split(r"(?<=[ |])\|(?= )", f" {line} ")[1:-1]] for line in LINES]
IN_BACKTICKS = re.compile(r"`([^`]+)`")


def resolve(dotted: str) -> object:
    """A module, or what stands in one; a field of a dataclass that has no default is its annotation."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            fields = getattr(found, "__dataclass_fields__", {})
            found = fields[name] if name in fields else getattr(found, name)
        return found
    raise LookupError(f"{dotted} is no module")


def test_the_page_has_the_names_of_the_documents():
    assert len(ROWS) > 50
    assert all(len(row) == 3 for row in ROWS), [row for row in ROWS if len(row) != 3]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: (IN_BACKTICKS.findall(row[0]) or [row[0]])[0][:40])
def test_a_name_is_where_the_page_says_or_not_here_for_a_reason(row):
    places = IN_BACKTICKS.findall(row[1])

    for place in places:
        resolve(place)
    assert places or len(row[2]) > 20
