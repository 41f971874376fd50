"""`MINIVLLM_LABS`: whose code runs, and where tracebacks point."""

import os
import re

import pytest
import torch
from checkout import Checkout

from labs.kit.regions import ROOT
from tests.worlds.engines import OPTIONS, TinyWorld

# A module without torch, with two exercises; 6.1 has two regions.
ADMISSION = """
from minivllm.core.lora_admission import LoRAAdmission
admission = LoRAAdmission(max_loras=1, max_wait_steps=3)
admission.begin_step(running=[2], pinned=[])
print(admission.fits(1), admission.fits(2))
print(admission.make_room([1]))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("overlay"))


@pytest.fixture
def checkout(shared):
    shared.forget()
    return shared


def loaded_from(checkout, labs, *modules):
    """Where these modules come from, relative to the copy."""
    code = f"import sys, {', '.join(modules)}\nfor m in {modules}: print(sys.modules[m].__file__)"
    result = checkout.execute(code, labs=labs)
    assert result.returncode == 0, result.stderr
    return [os.path.relpath(line, checkout.root) for line in result.stdout.split()]


@pytest.mark.parametrize(
    ("labs", "admission", "cache"),
    [
        ("", "minivllm/core", "minivllm/lora"),
        pytest.param("6", "labs/06_max_loras_scheduler", "minivllm/lora", marks=pytest.mark.nightly),
        ("5.1", "minivllm/core", "labs/05_slot_manager"),
        pytest.param(
            "6, 5", "labs/06_max_loras_scheduler", "labs/05_slot_manager", marks=pytest.mark.nightly
        ),
        ("all", "labs/06_max_loras_scheduler", "labs/05_slot_manager"),
    ],
)
def test_modules_come_from_where_the_variable_says(checkout, labs, admission, cache):
    found = loaded_from(checkout, labs, "minivllm.core.lora_admission", "minivllm.lora.lru_cache")

    assert found == [f"{admission}/lora_admission.py", f"{cache}/lru_cache.py"]


@pytest.mark.parametrize(("labs", "imported"), [("", "[]"), ("all", "['labs.kit.overlay', 'ast']")])
def test_importing_minivllm_imports_no_torch(checkout, labs, imported):
    code = (
        "import sys\nbefore = {*sys.modules}\nimport minivllm\n"
        "print([m for m in ('torch', 'labs.kit.overlay', 'ast') if m in {*sys.modules} - before])"
    )

    assert checkout.run("-c", code, labs=labs).stdout.strip() == imported


def test_one_exercise_is_the_learners_and_the_rest_of_its_module_ours(checkout):
    results = {labs: checkout.execute(ADMISSION, labs=labs) for labs in ("6.1", "6.4", "6.1,6.4", "6.5")}

    assert {labs: result.stdout for labs, result in results.items()} == {
        "6.1": "",
        "6.4": "False True\n",
        "6.1,6.4": "",
        "6.5": "False True\n[]\n",
    }
    assert results["6.4"].stderr.startswith("error: lab 6.4: ")


def put(checkout, answer):
    """An answer to 6.4 in a file whose other region is longer than ours."""
    checkout.forget()
    checkout.solve("6.1")
    path = checkout.file("6.4")
    text = re.sub(r"( *)(# region lab 6\.1: .*\n)", r"\1\2\1# So\n\1# it\n\1# is.\n", path.read_text())
    path.write_text(re.sub(r'raise Todo\("lab 6\.4.*', answer, text))
    return path


@pytest.mark.parametrize("labs", ["6", "6.4"])
def test_tracebacks_and_syntax_errors_point_at_the_learners_line(checkout, labs):
    path = put(checkout, "undefined()")
    raised, line = checkout.execute(ADMISSION, labs=labs), checkout.place("6.4", "undefined()")
    put(checkout, "due = +*3")
    unread, wrong = checkout.execute(ADMISSION, labs=labs), checkout.place("6.4", "+*3")

    said, code = (
        raised.stderr,
        f'File "{path}", line {line.rpartition(":")[2]}, in make_room\n    undefined()',
    )
    assert said.startswith("Traceback") and code in said
    assert said.rstrip().endswith("NameError: name 'undefined' is not defined")
    assert unread.stderr == f"error: {path}:{wrong.rpartition(':')[2]}: invalid syntax\n"
    assert (raised.returncode, unread.returncode) == (1, 1)


def test_a_text_without_a_file_can_be_read_as_source(checkout):
    code = """
import inspect
from labs.kit.overlay import Overlay, Source
Overlay({"minivllm.economics": Source("/no/where.py", "def f():\\n    return 3\\n")}).install()
from minivllm.economics import f
print(f(), inspect.getsource(f))
"""

    assert checkout.execute(code).stdout == "3 def f():\n    return 3\n\n"


@pytest.mark.parametrize("labs", ["40", "3.9", "rubbish", "3,", "3 5"])
def test_a_variable_that_means_nothing_is_refused_in_a_sentence(checkout, labs):
    result = checkout.execute("import minivllm", labs=labs)

    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: MINIVLLM_LABS={labs}: '")


def test_without_a_checkout_the_variable_is_refused_in_a_sentence(checkout):
    (checkout.root / "labs" / "starters.json").unlink()

    result = checkout.execute("import minivllm", labs="3")

    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error: the labs need the repository")


def test_a_starter_that_is_gone_or_has_lost_its_markers_is_named(checkout):
    path = checkout.file("3.2")
    path.write_text(path.read_text().replace("# region lab 3.2", "# the region of lab 3.2"))
    end = checkout.place("3.2", "# endregion")
    assert f"{end}: no region of a lab ends here" in checkout.execute("import minivllm", labs="3.3").stderr

    path.unlink()
    assert "labs/03_cpu_punica/by_token.py is missing" in checkout.execute("import minivllm", labs="3").stderr


def test_a_program_that_comes_to_an_exercise_that_is_todo_says_which(checkout):
    result = checkout.run("-m", "minivllm.cli", "inspect", str(ROOT / "adapters" / "sql"), labs="1.2")

    # On a slow machine, how far it is stands before it.
    error = "error: lab 1.2: module and side of an adapter tensor's name is still TODO"
    assert result.stderr.splitlines()[-1] == error
    assert result.returncode == 1


# ---- every process that runs a learner's code ---------------------------------------------------------------

WHOSE = """
import minivllm.core.lora_admission as admission

print(admission.__file__, flush=True)
"""
TESTS = f"""
import subprocess, sys
import minivllm.core.lora_admission as admission
from minivllm.processes import start_process


def test_here():
    assert "labs/06" in admission.__file__


def test_in_a_process_of_its_own():
    assert "labs/06" in subprocess.check_output([sys.executable, "-c", {WHOSE!r}], text=True)


def test_in_one_that_the_engine_starts(capfd):
    start_process("minivllm.says_whose")[1].wait()

    assert "labs/06" in capfd.readouterr().out
"""


def test_processes_that_pytest_and_the_engine_start_need_the_selection_alone(checkout):
    (checkout.root / "minivllm" / "says_whose.py").write_text(WHOSE)
    (checkout.root / "tests" / "test_whose.py").write_text(TESTS)

    result = checkout.pytest("tests/test_whose.py", labs="6")

    assert result.returncode == 0 and "3 passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.nightly
def test_an_engine_and_its_ranks_in_processes_of_their_own_have_it(checkout, tmp_path):
    """As `minivllm serve` starts them."""
    checkout.solve("2.1", "2.2")
    path, told = checkout.file("2.2"), tmp_path / "told"
    told.mkdir()
    path.write_text(f"{path.read_text()}\n\nimport os\nopen(f'{told}/{{os.getpid()}}', 'x').close()\n")
    world = TinyWorld(tmp_path / "world", "llama-llama3-rope", dtype=torch.float32)
    options = {**OPTIONS, "model": str(world.base), "tensor_parallel_size": 2}
    code = (
        "import os\n"
        "from minivllm import AsyncLLM, EngineArgs\n"
        f"llm = AsyncLLM.from_engine_args(EngineArgs(**{options}))\n"
        "print(os.getpid())\n"
        "llm.shutdown()\n"
    )

    result = checkout.run("-c", code, labs="2.2")

    assert result.returncode == 0, result.stderr
    others = {int(process.name) for process in told.iterdir()} - {int(result.stdout)}
    assert len(others) == 2
