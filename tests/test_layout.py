"""The house rules that a test can check: imports run one way, modules stay small, names are documented."""

import ast
from pathlib import Path

import house
import prose
import pytest
from code_lines import code_lines, function_lines
from imports import import_circles

PACKAGE = Path(__file__).resolve().parents[1] / "minivllm"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.read_text().strip()]

# Lowest first; a module may import from its own layer and from those before it.
LAYERS = (
    ("labs", "quiet"),
    (
        "config",
        "devices",
        "distributed",
        "engine_args",
        "faults",
        "palette",
        "processes",
        "progress",
        "scattered_reads",
        "sentences",
        "timed_patterns",
        "sampling_params",
        "structured_outputs",
        "validation",
        "model_options",
        "models.config",
        "models.interfaces",
        "models.demo_model",
        "layers.rotary",
    ),
    (
        "lora.seams",
        "lora.limits",
        "lora.checks",
        "lora.request",
        "lora.names",
        "lora.safetensors_file",
        "lora.weights_files",
        "lora.peft_helper",
        "lora.lru_cache",
        "lora.events",
    ),
    (
        "lora.module_weights",
        "lora.lora_weights",
        "lora.options.expert_weights",
        "lora.adapter_tensors",
        "lora.lora_model",
    ),
    ("layers", "models", "lora.ops", "text"),
    (
        "lora.mapping",
        "lora.slots",
        "lora.backend",
        "lora.loops_backend",
        "lora.runs_backend",
    ),
    ("lora.layers",),
    (
        "lora.replace",
        "lora.adaptable",
        "lora.wrapped_modules",
        "lora.tiers",
        "lora.adapter_slots",
        "lora.model_manager",
    ),
    ("lora.reports", "lora.loading", "lora.worker_manager"),
    ("lora.options", "lora.io", "lora.gpu", "lora.vllm"),
    ("lora", "economics"),
    ("guards.refusals", "guards.turns"),
    ("core", "policies"),
    ("elastic",),
    ("worker",),
    (
        "distributed.executor",
        "distributed.follower",
        "distributed.leader",
        "distributed.other_ranks",
        "distributed.rank_runner",
        "distributed.shared_reading",
        "distributed.step_messages",
        "distributed.torchrun",
    ),
    ("simulate",),
    ("engine", "guards", "serving", "text.answer", "text.chats"),
    ("server",),
    ("commands",),
    ("cli",),
)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__").removesuffix("__init__")


def layer_of(name: str) -> int:
    """The layer with the longest name that the module's name starts with."""
    found = [
        (len(prefix), number)
        for number, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if name == prefix or name.startswith(f"{prefix}.")
    ]
    assert found, f"minivllm.{name} is in no layer; add it to LAYERS"
    return max(found)[1]


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


@pytest.mark.parametrize("path", [f for f in FILES if module_name(f)], ids=module_name)
def test_imports_run_one_way(path):
    layer = layer_of(module_name(path))

    upward = [name for name in imports_of(ast.parse(path.read_text())) if layer_of(name) > layer]

    assert not upward, f"minivllm.{module_name(path)} imports {upward} from above"


def test_the_lora_package_knows_nothing_of_the_engine():
    for path in (PACKAGE / "lora").rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports_of(ast.parse(path.read_text()))}

        assert tops.isdisjoint({"core", "worker", "engine", "commands", "cli"}), path.name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_stays_small_and_says_what_it_is(path):
    text = path.read_text()

    assert len(text.splitlines()) <= 340
    assert ast.get_docstring(ast.parse(text))


def test_every_module_of_the_subject_names_the_vllm_file_it_stands_for():
    ours = {"lora/lru_cache.py", "lora/vllm/paths/stats.py", "lora/seams.py"}
    for path in [p for folder in ("lora", "core", "worker") for p in (PACKAGE / folder).rglob("*.py")]:
        if path.name == "__init__.py" or str(path.relative_to(PACKAGE)) in ours:
            continue

        assert "vllm/" in ast.get_docstring(ast.parse(path.read_text())), path.name


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_core_fits_into_two_books(rule):
    said = house.compare(rule.__name__, rule(), house.owed(rule.__name__))

    hint = "`python tests/helpers/house.py` writes what there is into house_debt.toml"
    assert not said, "\n".join([*said, hint])


def test_what_grows_is_new_or_is_settled_is_said():
    owed = {"a.py": {"lines": 300}, "b.py": {"lines": 210, "f": 44}, "gone.py": {"lines": 400}}
    found = {"a.py": {"lines": 301}, "b.py": {"lines": 205}, "new.py": {"lines": 201}}

    said = house.compare("long", found, owed)

    assert [sentence.split(":")[0] for sentence in said] == [
        *("long, a.py", "long, new.py", "long, b.py", "long, gone.py")
    ]


def test_long_sentences_are_found_in_docstrings_and_in_comments(tmp_path):
    many, some = " ".join(["word"] * 30), " ".join(["word"] * 29)
    text = f'''"""First {some}. Second {many}.

name     third {many}, `which counts once (x, y)`
another  fourth {some}.
"""
# Fifth {some}
# and more.
# Sixth {some}.
text = "{many} {many}"
'''
    path = tmp_path / "module.py"
    path.write_text(text)

    found = prose.long_sentences(path)

    assert {start.split()[0]: number for start, number in found.items()} == {
        "Second": 31,
        "third": 32,
        "Fifth": 32,
    }


def test_imports_of_other_rings_are_found_wherever_they_stand():
    text = """
from typing import TYPE_CHECKING
from minivllm.lora import seams, reports
from minivllm.lora.options_of_old import these
if TYPE_CHECKING:
    import minivllm.lora.gpu.kernels
def late():
    from minivllm.lora.io.hub import fetch
def __getattr__(name):
    from minivllm.lora import vllm
"""

    rings = ("gpu", "io", "reports", "vllm")
    assert house.outward(text) == [f"minivllm.lora.{ring}" for ring in rings]


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
