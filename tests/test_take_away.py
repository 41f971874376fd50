"""Each extension can be taken away, its folder and its line in assembly.py: the rest imports, and serves as before."""

import json
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.tools.nights import of_night
from tests.tools.take_away import (
    NEEDED_BY,
    extensions,
    outcome,
    own_files,
    run_tests_without,
    run_there,
    take_away,
)
from tests.worlds import demo

CORE_TESTS = (
    *("phase_01/test_request.py", "phase_01/test_layer_weights.py", "phase_05/test_lru_cache.py"),
    *("lora/test_plain_manager.py", "phase_06/test_token_budget.py", "phase_06/test_lora_admission.py"),
    *("core/test_scheduler_requests.py", "phase_07/test_engine_loop.py", "phase_07/test_mixed_step.py"),
    *("engine/test_plain_core.py", "engine/test_engine_tokens.py", "test_sampling_params.py"),
)

IMPORTS = """
import importlib, json, pathlib
import minivllm
broken = {}
for path in sorted(pathlib.Path("minivllm").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except Exception as error:
        broken[name.removeprefix("minivllm.")] = f"{type(error).__name__}: {error}"
print(json.dumps(broken))
"""


@dataclass
class Without:
    """A copy of the checkout without an extension."""

    name: str
    root: Path


# In every run one of them, which is the smallest that has a line in assembly.py.
WHICH = [pytest.param(name, marks=() if name == "ahead" else pytest.mark.nightly) for name in NEEDED_BY]


# What takes most, of a fourth of them a night.
tonight = pytest.mark.parametrize("without", of_night(list(NEEDED_BY), 4), indirect=True)


@pytest.fixture(scope="module", params=WHICH)
def without(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("without") / request.param
    take_away(request.param, root)
    return Without(request.param, root)


def test_every_folder_beside_the_core_is_an_extension_and_has_its_entry():
    assert sorted(NEEDED_BY) == extensions()


def test_all_others_can_be_imported_but_those_that_say_so(without):
    done = run_there(without.root, "-c", IMPORTS)

    assert not done.returncode, done.stderr[-3000:]
    broken = json.loads(done.stdout.splitlines()[-1])
    needing = NEEDED_BY[without.name]
    unforeseen = {
        m: error for m, error in broken.items() if not f"{m}.".startswith(tuple(f"{n}." for n in needing))
    }
    assert unforeseen == {}
    assert [n for n in needing if not any(f"{m}.".startswith(f"{n}.") for m in broken)] == [], (
        "they need it no more"
    )


@pytest.mark.nightly
@tonight
def test_the_demo_has_the_tokens_of_the_whole_product(without, asked_and_answers):
    asked, answers = asked_and_answers

    done = run_there(without.root, "-c", demo.SCRIPT.format(module="minivllm"), given=json.dumps(asked))

    assert not done.returncode, done.stderr[-3000:]
    tokens, where, imported = json.loads(done.stdout.splitlines()[-1])
    assert Path(where) == without.root / "minivllm" / "__init__.py"
    assert not [name for name in imported if f"{name}.".startswith(f"minivllm.{without.name}.")]
    assert tokens == answers


@pytest.fixture(scope="module")
def asked_and_answers():
    folders = {name: demo.adapter_folder(name) for name in demo.NAMES}
    asked = demo.asked(demo.demo_base(), folders, demo.task_prompts(1))
    return asked, demo.answers(asked)


@pytest.mark.nightly
@tonight
def test_the_cores_tests_pass(without):
    paths = [f"tests/{name}" for name in CORE_TESTS]

    _, others, passed = run_tests_without(without.name, without.root, "-q", *paths)

    assert others == []
    assert passed > 50, "most of the core's tests need it"


REPORT = """<testsuites><testsuite>
<testcase classname="tests.one" name="test_a"/>
<testcase classname="tests.one" name="test_b">
<failure message="ModuleNotFoundError: No module named 'minivllm.gpu.fused'">...</failure></testcase>
<testcase classname="tests.one" name="test_c">
<error message="ModuleNotFoundError">No module named 'minivllm.gpus'</error></testcase>
<testcase classname="tests.two" name="test_d"><failure message="ValueError">needs minivllm.gpu, which is not there
</failure></testcase>
</testsuite></testsuites>"""


def test_a_test_that_fails_for_something_else_is_told_from_the_extensions_own(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)

    own, others, passed = outcome("gpu", tmp_path / "report.xml")

    assert own == ["tests/one::test_b", "tests/two::test_d"]
    assert others == ["tests/one::test_c"] and passed == 1


def test_whoever_imports_an_extension_is_its_own_also_by_way_of_a_helper():
    own = own_files("ahead")

    assert "tests/ahead/test_run_ahead.py" in own, "worlds/ahead.py imports it"
    assert "tests/phase_07/test_mixed_step.py" not in own


def test_each_has_its_night_before_any_has_another():
    names = extensions()
    days = [date(2026, 2, 25) + timedelta(days=day) for day in range(len(names))]

    assert sorted(name for day in days for name in of_night(names, len(names), day)) == names
    assert sorted(name for day in days[:3] for name in of_night(names, 3, day)) == names
