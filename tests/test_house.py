"""The rules of the house (docs/architecture.md) that a tool can check: who imports whom, and who changes what."""

import subprocess
import sys
from pathlib import Path

import pytest

from minivllm.assembly import lora_extensions
from minivllm.extension import Extension
from tests.tools.house import ROOT, House, circles_of, core_files, import_graph


@pytest.fixture(scope="module")
def house():
    return House()


def test_imports_run_from_the_top_down_also_by_way_of_others():
    linter = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True)

    assert not done.returncode, done.stdout


def test_the_core_imports_itself_alone_packages_that_run_counted(house):
    core = set(core_files())

    outside = {house.name_of(path) for path in house.closure(*core) - core}

    assert not outside


@pytest.fixture(scope="module")
def plain():
    return import_graph(ROOT / "minivllm", annotations=False)


def test_no_imports_go_round_in_a_circle(plain):
    assert circles_of(plain) == []


def test_those_for_annotations_go_round_by_three_files_alone(plain):
    """Each says what a part does for the very object that has it, and so names the type of who imports it."""
    named = {"minivllm.lora.extensions", "minivllm.worker.kv_memory", "minivllm.worker.warm_up"}
    annotated = import_graph(ROOT / "minivllm")

    assert circles_of({name: (plain if name in named else annotated)[name] for name in annotated}) == []


def test_nobody_replaces_a_method_of_somebody_elses_object(house):
    assert house.replaced_methods() == []


def test_nobody_puts_attributes_on_classes_or_into_a_dict_of_attributes(house):
    assert house.set_from_outside() == []


def test_no_class_is_the_sum_of_many(house):
    """A layer that is also one of vLLM's names may have three ancestors of ours, anything else two.

    The group that sums in its peers' memory is a group of processes, a share of a model, and `Ranks` to the core.
    """
    deep = {name: len(house.ancestors(name)) for name in house.classes}

    most = {name: 3 if name.endswith("LoRA") or name == "PeerGroup" else 2 for name in deep}
    assert {name: number for name, number in deep.items() if number > most[name]} == {}


def test_only_the_package_itself_and_vllms_names_are_looked_up_late(house):
    assert set(house.module_getattrs()) <= {"__init__.py", "lora/layers/__init__.py"}


MADE = {
    "core": "from made import late\nclass Core:\n    size = 1\n    def step(self): self.kept = 1\n",
    "late": "def f():\n    import made.other\n",
    "other": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.deep.c import C\n",
    "deep/__init__": "from made import side\n",
    "deep/c": "class C: pass\n",
    "side": "",
    "free": "import os\n",
    "patch": (
        "from made.core import Core\n"
        "def patch(core):\n    core.step = None\n    core.kept = 2\n    core.size = 3\n"
        "    Core.size = 4\n    setattr(Core, 'step', 1)\n    core.__dict__['step'] = 1\n"
    ),
}


@pytest.fixture
def made(tmp_path):
    return House(write_package(tmp_path, {"__init__": "", **MADE}))


CIRCLES = {
    "wherever the imports stand": (
        {
            "__init__": "from made.a import one",
            "a": "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.b import B",
            "b": "def late():\n    import made.deep.c",
            "deep/__init__": "",
            "deep/c": "from ..a import A\nfrom made import a",
            "alone": "from made.a import A\nimport made.alone",
            "above": "from made.deep import c\nfrom made import alone",
        },
        [["made.a", "made.b", "made.deep.c"], ["made.alone"]],
    ),
    "but for what Python runs besides": (
        {
            "__init__": "from made.lora import b",
            "lora/__init__": "from made.lora import a, b\nfrom . import c",
            "lora/a": "from made.lora.b import B\nfrom . import b",
            "lora/b": "from torch import nn\nfrom made.lora import c",
            "lora/c": "def __getattr__(name):\n    from made.lora import a\n    return getattr(a, name)",
        },
        [],
    ),
    "and of a name that is no module by its package": (
        {"__init__": "from . import a", "a": "def late():\n    from made import SOMETHING"},
        [["made", "made.a"]],
    ),
}


@pytest.mark.parametrize("case", CIRCLES)
def test_circles_of_imports_are_found(tmp_path, case):
    files, circles = CIRCLES[case]

    assert circles_of(import_graph(write_package(tmp_path, files))) == circles


def write_package(folder, files):
    for name, text in files.items():
        path = folder / "made" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "made"


def test_a_closure_counts_late_imports_annotations_and_packages_that_run(made):
    found = {made.name_of(path) for path in made.closure(made.package / "core.py")}

    assert found == {"core.py", "late.py", "other.py", "deep/__init__.py", "deep/c.py", "side.py"}


def test_what_is_changed_from_outside_is_found_and_plain_data_is_not(made):
    assert made.replaced_methods() == ["patch.py:3 core.step"]
    assert made.set_from_outside() == [
        "patch.py:6 Core.size",
        "patch.py:7 setattr(Core, 'step', 1)",
        "patch.py:8 core.__dict__",
    ]


def test_two_extensions_that_bring_the_same_for_adapters_are_refused():
    both = [Extension(lora={"backends": {}}), Extension(lora={"options": (), "backends": {}})]

    with pytest.raises(ValueError, match="two extensions bring backends of LoRAExtensions"):
        lora_extensions(both)
