"""The map to vLLM leads somewhere: every name on its left is vLLM's, every one in its middle is ours."""

import ast
import importlib
import itertools
import re
from inspect import getsource, ismodule

import pytest

from tests.tools import vllm_names
from tests.tools.vllm_names import IN_BACKTICKS, PATH, ROOT, looks_like_a_name

VLLM = vllm_names.known()


def table(header):
    """The rows of the map's table that begins with this line."""
    lines = (ROOT / "docs" / "map-to-vllm.md").read_text().split(header + "\n")[1].splitlines()[1:]
    rows = itertools.takewhile(lambda line: line.startswith("| "), lines)
    return [[cell.strip() for cell in row.strip("|\n").split(" | ")] for row in rows]


ROWS = table("| vLLM | here | what differs, and why |")
SINCE = table("| part | in 0.33.0 | what has changed, and what has not |")
NOT_HERE = table("| in vLLM | why it is not here |")
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
        unknown = {name for name in names if looks_like_a_name(name)} - VLLM["names"]
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


@pytest.fixture(scope="module")
def defined():
    """What our sources define: classes, functions, fields and attributes."""
    nodes = [
        node for path in (ROOT / "minivllm").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    names = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    targets = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    targets += [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    return names | {getattr(target, "id", getattr(target, "attr", None)) for target in targets}


@pytest.mark.parametrize("row", NOT_HERE, ids=lambda row: row[0][:40])
def test_what_is_not_here_is_in_vllm_and_not_here(row, defined):
    left = row[0]
    names = {name for name in names_of(left) if looks_like_a_name(name)}
    paths = {token.rstrip("/") for token in IN_BACKTICKS.findall(left) if PATH.fullmatch(token)}

    assert names - VLLM["names"] == set(), "not in vLLM 0.22.1"
    assert paths - VLLM["paths"] == set(), "not in vLLM 0.22.1"
    assert names & defined == set(), "it is here by now"


@pytest.mark.parametrize("row", SINCE, ids=lambda row: row[0])
def test_what_has_changed_since_is_said_of_files_and_names_of_the_later_version(row):
    _, middle, changes = row
    paths = {token for token in IN_BACKTICKS.findall(middle) if PATH.fullmatch(token)}
    names = {name for name in names_of(middle) if looks_like_a_name(name)}

    assert paths, "no file of vLLM"
    assert paths - VLLM["later"]["paths"] == set(), "not in vLLM 0.33.0"
    assert names - VLLM["later"]["names"] == set(), "not in vLLM 0.33.0"
    known = {*VLLM["names"], *VLLM["later"]["names"]}
    assert {name for name in names_of(changes) if looks_like_a_name(name)} - known == set(), "in neither"
