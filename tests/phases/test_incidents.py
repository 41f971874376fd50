"""Every incident of the page has a test that is there."""

import ast
import re
import tomllib
from functools import cache

import pytest

from tests.tools.vllm_names import ROOT

PAGE = (ROOT / "docs" / "incidents.md").read_text()
TEST = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")
ROWS = {int(n): row for n, row in re.findall(r"^\| (\d+) (\|.*)$", PAGE, re.M)}


@cache
def functions_of(path):
    """Names of the test functions in a file, those of classes too."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_all_of_them_are_there():
    assert list(ROWS) == [*range(1, 24), 25, 26, 28, 29, 30, 31]


@pytest.mark.parametrize("number", ROWS)
def test_an_incident_has_a_test_and_labs_that_exist(number):
    last_cell = ROWS[number].rstrip(" |").rpartition(" | ")[2]

    assert TEST.findall(ROWS[number])
    for lab in re.findall(r"\b\d+\.\d+\b", last_cell):
        (hints,) = ROOT.glob(f"labs/{int(lab.partition('.')[0]):02}_*/hints.toml")
        assert lab in tomllib.loads(hints.read_text())


def test_every_test_that_the_page_names_exists():
    assert [(name, path) for name, path in TEST.findall(PAGE) if name not in functions_of(path)] == []
