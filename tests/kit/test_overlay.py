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


@pytest.mark.parametrize("labs", [None, "", "all"])
def test_importing_minivllm_imports_no_torch(checkout, labs):
    code = (
        "import sys\nbefore = {*sys.modules}\nimport minivllm\n"
        "print([m for m in ('torch', 'labs.kit.overlay', 'ast') if m in {*sys.modules} - before])"
    )
    result = checkout.run("-c", code, labs=labs)

    assert result.stdout.strip() == ("['labs.kit.overlay', 'ast']" if labs else "[]")


def test_one_exercise_is_the_learners_and_the_rest_of_its_module_ours(checkout):
    results = {labs: checkout.execute(ADMISSION, labs=labs) for labs in ("6.1", "6.4", "6.1,6.4", "6.5")}

    assert {labs: result.stdout for labs, result in results.items()} == {
        "6.1": "",
        "6.4": "False True\n",
        "6.1,6.4": "",
        "6.5": "False True\n[]\n",
    }
    assert results["6.4"].stderr.startswith("error: lab 6.4: ")


def test_what_is_broken_in_another_exercise_does_not_matter(checkout):
    path = checkout.file("6.1")
    path.write_text(path.read_text().replace('raise Todo("lab 6.4', 'raise (((Todo("lab 6.4'))
    checkout.solve("6.1")

    assert checkout.execute(ADMISSION, labs="6.1").stdout == "False True\n[]\n"


def put(checkout, answer):
    """An answer to 6.4 in a file whose other region is longer than ours."""
    checkout.solve("6.1")
    path = checkout.file("6.4")
    text = re.sub(r"( *)(# region lab 6\.1: .*\n)", r"\1\2\1# So\n\1# it\n\1# is.\n", path.read_text())
    path.write_text(re.sub(r'raise Todo\("lab 6\.4.*', answer, text))
    return path


@pytest.mark.parametrize("labs", ["6", "6.4"])
def test_tracebacks_point_at_the_learners_line(checkout, labs):
    path = put(checkout, "undefined()")

    result = checkout.execute(ADMISSION, labs=labs)

    line = checkout.place("6.4", "undefined()").rpartition(":")[2]
    assert f'File "{path}", line {line}, in make_room\n    undefined()' in result.stderr


@pytest.mark.parametrize("labs", ["6", "6.4"])
def test_syntax_errors_point_at_the_learners_line(checkout, labs):
    path = put(checkout, "due = +*3")

    result = checkout.execute(ADMISSION, labs=labs)

    line = checkout.place("6.4", "+*3").rpartition(":")[2]
    assert (result.returncode, result.stderr) == (1, f"error: {path}:{line}: invalid syntax\n")


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
    result = checkout.run("-m", "minivllm.cli", "--help", labs=labs)

    assert result.returncode == 1
    [sentence] = result.stderr.strip().split("\n")
    assert sentence.startswith(f"error: MINIVLLM_LABS={labs}: '")


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
    command = ["-m", "minivllm.cli", "inspect", str(ROOT / "adapters" / "sql")]
    result = checkout.run(*command, labs="1.2")

    assert result.stderr == "error: lab 1.2: module and side of an adapter tensor's name is still TODO\n"
    assert result.returncode == 1


def test_an_error_of_a_learners_code_has_its_traceback(checkout):
    put(checkout, "undefined()")

    result = checkout.execute(ADMISSION, labs="6.4")

    assert result.stderr.startswith("Traceback") and result.returncode == 1
    assert result.stderr.rstrip().endswith("NameError: name 'undefined' is not defined")


# ---- every process that runs a learner's code ---------------------------------------------------------------

WHOSE = "import minivllm.core.lora_admission as m; print(m.__file__)"


def test_pytest_needs_the_selection_alone(checkout):
    test = checkout.root / "tests" / "test_whose.py"
    test.write_text(
        "import os, subprocess, sys\n"
        "import minivllm.core.lora_admission as admission\n\n"
        "def test_here():\n"
        "    assert 'labs/06' in admission.__file__\n\n"
        "def test_in_a_process_of_its_own():\n"
        f"    said = subprocess.check_output([sys.executable, '-c', {WHOSE!r}], text=True)\n"
        "    assert 'labs/06' in said\n"
    )
    code = (
        f"import os, pytest\nos.environ['MINIVLLM_LABS'] = '6'\nraise SystemExit(pytest.main({[str(test)]}))"
    )

    result = checkout.execute(code)

    assert result.returncode == 0, result.stdout + result.stderr


def test_processes_that_the_engine_starts_have_it(checkout):
    module = checkout.root / "minivllm" / "says_whose.py"
    module.write_text(
        "import os, sys\n"
        "import minivllm.core.lora_admission as admission\n"
        "os.write(int(sys.argv[1]), b'')\n"
        "print(admission.__file__, flush=True)\n"
    )
    code = (
        "from minivllm.processes import start_process\n"
        "_, process = start_process('minivllm.says_whose')\n"
        "process.wait()\n"
    )

    result = checkout.execute(code, labs="6")

    assert result.stdout.strip().endswith("labs/06_max_loras_scheduler/lora_admission.py"), result.stderr


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
