"""`MINIVLLM_LABS`: whose code runs, and where tracebacks point."""

import os
import re

import pytest
from checkout import Checkout

from minivllm.labs import ROOT

# A module without torch, with two exercises; 6.1 has two regions.
ADMISSION = """
from minivllm.core.lora_admission import LoRAAdmission
admission = LoRAAdmission(max_loras=1, max_wait_steps=3)
admission.begin_step(running=[2], pinned=[])
print(admission.fits(1), admission.fits(2))
print(admission.make_room([1]))
"""


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


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
    code = "import sys, minivllm\nprint([m for m in ('torch', 'minivllm.labs', 'ast') if m in sys.modules])"
    result = checkout.run("-c", code, labs=labs)

    assert result.stdout.strip() == ("['minivllm.labs', 'ast']" if labs else "[]")


def test_one_exercise_is_the_learners_and_the_rest_of_its_module_ours(checkout):
    results = {labs: checkout.execute(ADMISSION, labs=labs) for labs in ("6.1", "6.4", "6.1,6.4", "6.5")}

    assert {labs: result.stdout for labs, result in results.items()} == {
        "6.1": "",
        "6.4": "False True\n",
        "6.1,6.4": "",
        "6.5": "False True\n[]\n",
    }
    assert "Todo: lab 6.4: " in results["6.4"].stderr


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
    put(checkout, "due = +*3")

    result = checkout.execute(ADMISSION, labs=labs)

    line = checkout.place("6.4", "+*3").rpartition(":")[2]
    assert f'lora_admission.py", line {line}\n' in result.stderr
    assert result.stderr.rstrip().endswith("SyntaxError: invalid syntax")


def test_a_text_without_a_file_can_be_read_as_source(checkout):
    code = """
import inspect
from minivllm.labs import Overlay, Source
Overlay({"minivllm.economics": Source("/no/where.py", "def f():\\n    return 3\\n")}).install()
from minivllm.economics import f
print(f(), inspect.getsource(f))
"""

    assert checkout.execute(code).stdout == "3 def f():\n    return 3\n\n"


@pytest.mark.parametrize("labs", ["12", "3.9", "rubbish", "3,", "3 5"])
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


def test_a_command_says_first_whose_code_it_runs_and_then_what_is_todo(checkout):
    checkout.solve("5.1")

    command = ["-m", "minivllm.cli", "inspect", str(ROOT / "adapters" / "sql")]
    result = checkout.run(*command, labs="1.2,5.1")

    first, second, last = result.stderr.strip().split("\n")
    assert first == "minivllm.lora.names is yours, labs/01_request_and_weights/names.py; still TODO: 1.2"
    assert second == "minivllm.lora.lru_cache is yours, labs/05_slot_manager/lru_cache.py; nothing left TODO"
    assert last == "error: lab 1.2: module and side of an adapter tensor's name is still TODO"
    assert result.returncode == 2
