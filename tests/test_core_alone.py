"""The core's files in an empty folder are an engine: the tokens of the whole product, and of transformers + PEFT."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.tools.house import ROOT, core_files
from tests.tools.take_away import find_nothing_elsewhere
from tests.worlds import demo
from tests.worlds.engines import tiny_world


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with the core's files as a package, whose own `__init__` is empty, and with nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    for path in core_files():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (folder / "minivllm" / "__init__.py").touch()
    find_nothing_elsewhere(folder)
    return folder


def run_alone(folder, *arguments, given=""):
    """A Python that finds the folder's package first, started elsewhere."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, cwd=folder.parent, env=environment
    )
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout


def test_each_of_its_modules_can_be_imported_by_itself_alone(alone):
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in core_files()]
    names = [name.removesuffix(".__init__") for name in names]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)\nprint('all')"

    assert run_alone(alone, "-c", code) == "all\n"


def test_it_serves_more_adapters_than_slots_and_base_in_one_batch(alone, tmp_path_factory):
    world = tiny_world(tmp_path_factory)
    pairs = world.workload(rows=2)
    folders = {name: world.path(name) for name in world.names}
    asked = demo.asked(world.base, folders, pairs, dtype="float64", max_model_len=256, warm_up=False)

    script = demo.SCRIPT.format(module="minivllm.engine.llm")
    answers, where, imported = json.loads(run_alone(alone, "-c", script, given=json.dumps(asked)))

    assert where == str(alone / "minivllm" / "__init__.py")
    assert "minivllm.assembly" not in imported and len(imported) > 40
    assert answers == demo.answers(asked)
    oracle = world.oracle()
    assert answers == [oracle.greedy(name, prompt, demo.NUM_TOKENS) for name, prompt in pairs]
    assert len({tuple(answer) for answer in answers}) == len(answers), "adapters make no difference"
