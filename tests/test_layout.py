"""The house rules that a test can check: imports run one way, modules stay small, names are documented."""

import ast
from pathlib import Path

import pytest

from tests.tools.house import code_lines, function_lines, import_circles

PACKAGE = Path(__file__).resolve().parents[1] / "minivllm"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.read_text().strip()]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__").removesuffix("__init__")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(tree: ast.AST) -> set[str]:
    """Modules of minivllm that run when this one does; those for annotations and for vLLM's names do not."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node) or getattr(node, "name", "") == "__getattr__":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minivllm."):
            found.add(node.module.removeprefix("minivllm."))
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("minivllm.") for a in node.names if a.name.startswith("minivllm.")}
        found |= imports_of(node)
    return found


def test_the_lora_package_knows_nothing_of_the_engine():
    for path in (PACKAGE / "lora").rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports_of(ast.parse(path.read_text()))}

        assert tops.isdisjoint({"core", "worker", "engine", "commands", "cli"}), path.name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_circles_of_imports_are_found_wherever_the_imports_stand(tmp_path):
    package = write_package(
        tmp_path,
        {
            "__init__": "from made.a import one",
            "a": "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.b import B",
            "b": "def late():\n    import made.deep.c",
            "deep/__init__": "",
            "deep/c": "from ..a import A\nfrom made import a",
            "alone": "from made.a import A\nimport made.alone",
            "above": "from made.deep import c\nfrom made import alone",
        },
    )

    assert import_circles(package) == [["made.a", "made.b", "made.deep.c"], ["made.alone"]]


def test_what_python_runs_besides_closes_no_circle(tmp_path):
    package = write_package(
        tmp_path,
        {
            "__init__": "from made.lora import b",
            "lora/__init__": "from made.lora import a, b\nfrom . import c",
            "lora/a": "from made.lora.b import B\nfrom . import b",
            "lora/b": "from torch import nn\nfrom made.lora import c",
            "lora/c": "def __getattr__(name):\n    from made.lora import a\n    return getattr(a, name)",
        },
    )

    assert import_circles(package) == []


def test_a_name_that_is_no_module_is_the_packages_own(tmp_path):
    files = {"__init__": "from . import a", "a": "def late():\n    from made import SOMETHING"}

    assert import_circles(write_package(tmp_path, files)) == [["made", "made.a"]]


def write_package(folder, files):
    for name, text in files.items():
        path = folder / "made" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "made"


def test_lines_of_code_leave_out_what_is_prose(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(MODULE)

    assert code_lines(path) == 10
    assert function_lines(path) == {"Thing.method": 6, "Thing.method.inner": 1}


MODULE = """\"\"\"Of a module.

Two lines.
\"\"\"

import os  # counts


class Thing:
    \"\"\"Of a class.\"\"\"

    # a comment
    name = \"\"\"no docstring,
    so it counts\"\"\"

    @property
    def method(
        self,
    ):
        # a comment
        def inner(): return 1

        return inner
"""
