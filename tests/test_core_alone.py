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

IMPORT_ALL = "import importlib\nfor name in {names}: importlib.import_module(name)"


@pytest.fixture
def alone(tmp_path):
    """A folder with the core's files as a package, whose own `__init__` is empty, and with nothing else."""
    for path in core_files():
        copy = tmp_path / "alone" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (tmp_path / "alone" / "minivllm" / "__init__.py").touch()
    find_nothing_elsewhere(tmp_path / "alone")
    return tmp_path / "alone"


def test_it_serves_more_adapters_than_slots_and_base_in_one_batch(alone, tmp_path_factory):
    """In a Python that finds the folder's package first, started elsewhere; then each of its modules is imported."""
    world = tiny_world(tmp_path_factory)
    pairs = world.workload(rows=2)
    folders = {name: world.path(name) for name in world.names}
    asked = demo.asked(world.base, folders, pairs, dtype="float64", max_model_len=256, warm_up=False)
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in core_files()]
    modules = [module.removesuffix(".__init__") for module in modules]

    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            demo.SCRIPT.format(module="minivllm.engine.llm") + IMPORT_ALL.format(names=modules),
        ],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=alone.parent,
        env={**os.environ, "PYTHONPATH": str(alone), "OMP_NUM_THREADS": "1"},
    )

    assert not done.returncode, done.stderr[-3000:]
    answers, where, imported = json.loads(done.stdout)
    assert where == str(alone / "minivllm" / "__init__.py")
    assert "minivllm.assembly" not in imported and len(imported) > 40
    assert answers == demo.answers(asked)
    oracle = world.oracle()
    assert answers == [oracle.greedy(name, prompt, demo.NUM_TOKENS) for name, prompt in pairs]
    assert len({tuple(answer) for answer in answers}) == len(answers), "adapters make no difference"
