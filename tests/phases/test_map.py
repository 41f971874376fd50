"""The map to vLLM leads somewhere: every name on its left is vLLM's, every one in its middle is ours."""

import importlib
import json
import re
from inspect import getsource, ismodule

import pytest
import vllm_names
from vllm_names import IN_BACKTICKS, PATH, ROOT, looks_like_a_name

VLLM = json.loads(vllm_names.FILE.read_text())
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs" / "map-to-vllm.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| vLLM |")
]
GONE = "vLLM up to "  # what 0.22.1 does not have any more


def ours(dotted):
    """A module, or what stands in one. LookupError where there is none."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if not hasattr(found, name):
                raise LookupError(f"{dotted}: there is no {name}")
            found = getattr(found, name)
        return found
    raise LookupError(f"{dotted} is no module")


def names_of(cell):
    """The names in a cell, but for files."""
    return [name for name in IN_BACKTICKS.findall(cell) if name.isidentifier()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: names_of(row[0])[0])
def test_a_row_leads_from_a_name_of_vllm_to_what_it_is_here(row):
    left, middle = row[:2]
    names = names_of(left)
    dotted = IN_BACKTICKS.findall(middle)
    places = [ours(token) for token in dotted]

    if not left.startswith(GONE):
        unknown = {name for name in names if looks_like_a_name(name)} - set(VLLM["names"])
        assert unknown == set(), "not in vLLM 0.22.1"
        assert PATH.search(left), "no file of vLLM"
    # What has another name here is named, not its module alone.
    is_renamed = any(
        not ismodule(place) and token.split(".")[-1] not in names for token, place in zip(dotted, places)
    )
    missing = [name for name in names if not any(has(place, name) for place in places)]
    assert not missing or is_renamed, f"{missing} are not in {middle}"


def has(module, name):
    """Whether a module has it: itself, in one of its classes or their fields, or on their instances."""
    if hasattr(module, name):
        return True
    values = vars(module).values() if ismodule(module) else []
    classes = [base for value in values if isinstance(value, type) for base in value.__mro__]
    fields = {field for cls in classes for field in vars(cls).get("__annotations__", ())}
    is_set = re.search(rf"self\.{name}\b", getsource(module)) if ismodule(module) else None
    return name in fields or any(hasattr(value, name) for value in values) or bool(is_set)


def test_the_map_has_every_part_that_the_engine_stands_for():
    """A class or function whose docstring says `vLLM: the same name` is in the map, if its module is in it."""
    text = (ROOT / "docs" / "map-to-vllm.md").read_text()
    modules = {dotted for row in ROWS for dotted in IN_BACKTICKS.findall(row[1])}
    missing = []
    for dotted in sorted(modules):
        place = ours(dotted)
        for name, value in vars(place).items() if ismodule(place) else []:
            says_so = re.search(r"vLLM: the same name", getattr(value, "__doc__", None) or "")
            if says_so and getattr(value, "__module__", "") == dotted and f"`{name.lstrip('_')}`" not in text:
                missing.append(f"{dotted}.{name}")

    assert missing == []
