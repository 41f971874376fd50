"""docs/names.md and documents.md: what documents about vLLM name is where they say, or is not so for a reason."""

import importlib
import re
from pathlib import Path

import pytest

import minivllm.vllm  # noqa: F401

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows_of(page: str) -> list[list[str]]:
    """The cells of each row of the page's tables."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| in documents")]
    return [[cell.strip() for cell in re.split(r"(?<=[ |])\|(?= )", f" {row} ")[1:-1]] for row in rows]


ROWS = rows_of("names.md")
OTHERWISE = rows_of("documents.md")
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


def first_name(row: list[str]) -> str:
    return (IN_BACKTICKS.findall(row[0]) or [row[0]])[0][:40]


def test_the_page_has_the_names_of_the_documents():
    assert len(ROWS) > 50
    assert all(len(row) == 3 for row in ROWS), [row for row in ROWS if len(row) != 3]


@pytest.mark.parametrize("row", ROWS, ids=first_name)
def test_a_name_is_where_the_page_says_or_not_here_for_a_reason(row):
    places = IN_BACKTICKS.findall(row[1])

    for place in places:
        resolve(place)
    assert places or len(row[2]) > 20


@pytest.mark.parametrize("row", OTHERWISE, ids=first_name)
def test_what_is_not_so_here_has_a_reason_and_what_stands_for_it_is_there(row):
    _, here, reason = row
    whose, _, why = reason.partition(": ")

    for place in IN_BACKTICKS.findall(here):
        resolve(place)
    assert whose in ("vLLM", "decided")
    assert len(why) > 3 and (here or len(why) > 20)
