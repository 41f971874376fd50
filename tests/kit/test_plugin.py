"""What pytest says when the code is a learner's."""

import pytest
from checkout import Checkout
from hypothesis import HealthCheck, settings

from labs.kit.plugin import todo_of


def test_examples_are_the_same_in_every_run_and_none_is_judged_by_a_clock():
    chosen = settings()

    assert chosen.derandomize and chosen.database is None
    assert chosen.deadline is None and HealthCheck.too_slow in chosen.suppress_health_check


MARKED = """
import pytest
import torch
from minivllm.lora.lru_cache import LRUCache


@pytest.fixture
def full():
    cache = LRUCache(1)
    cache.put(1, "a")
    return cache


@pytest.mark.lab("5.1")
def test_fixture(full):
    pass


@pytest.mark.lab("5.1")
def test_wrapped():
    try:
        LRUCache(1).touch(1)
    except Exception as error:
        raise RuntimeError("wrapped") from error


@pytest.mark.lab("5.1")
def test_wrong():
    [1, 2].index(3)


@pytest.mark.lab("5.1")
def test_right():
    assert LRUCache(1).get(3) is None
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("plugin"))
    (checkout.root / "tests" / "phase_05" / "test_marked.py").write_text(MARKED)
    return checkout


def test_what_is_unfinished_is_todo_and_what_is_wrong_has_failed_in_a_few_lines(checkout):
    path = checkout.file("5.1")
    path.write_text(path.read_text().replace("raise Todo(", "self.nothing(", 1))
    place = checkout.place("5.1", "self.nothing(")
    asked = 1 + MARKED.split("\n").index('        raise RuntimeError("wrapped") from error')

    short = checkout.pytest("tests/phase_05/test_marked.py", labs="5")
    long = checkout.pytest("tests/phase_05/test_marked.py::test_wrapped", "--full-trace", labs="5.1").stdout
    checkout.forget()

    assert short.returncode == 1
    assert "TODO lab 5.1: use, and forget what was used longest ago (1 test)" in short.stdout
    assert "2 failed, 1 passed, 1 todo" in short.stdout
    places = f"your code: {place}\nasked in tests/phase_05/test_marked.py:{asked}\n"
    assert f"\nlab 5.1: RuntimeError: wrapped\n{places}" in short.stdout
    assert "def touch" not in short.stdout and "def touch" in long


def test_todo_alone_is_no_success_either(checkout):
    result = checkout.pytest("tests/phase_05/test_marked.py::test_wrapped", labs="5.1")

    assert result.returncode == 1
    assert "1 todo" in result.stdout
    assert "FAILURES" not in result.stdout


def test_a_kernel_that_is_unfinished_is_todo(checkout):
    result = checkout.pytest("tests/phase_04/test_kernels.py", "-k", "add_up and 1-1-8", labs="4.2")

    assert " todo in " in result.stdout
    assert "failed" not in result.stdout


def test_an_error_while_triton_compiles_may_say_todo_and_other_texts_may_not():
    compilation = type("CompileTimeAssertionFailure", (Exception,), {"__module__": "triton.compiler.errors"})

    assert (
        todo_of(compilation('at 3:4: static_assert(False, "lab 4.2: a kernel")\nlab 4.2: a kernel'))
        == "lab 4.2: a kernel"
    )
    assert todo_of(AssertionError("lab 4.2: a kernel")) == "lab 4.2: a kernel"
    assert todo_of(AssertionError("expected lab 4.2: a kernel")) is None
    assert todo_of(ValueError("lab 4.2: a kernel")) is None


def test_the_engine_itself_fails_as_anything_else_does(checkout):
    result = checkout.pytest("tests/phase_05/test_marked.py::test_wrong")

    assert ">       [1, 2].index(3)" in result.stdout
