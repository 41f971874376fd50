"""Nightly tests: `make test` leaves them out and says so, graders do not."""

import pytest
import torch
from checkout import Checkout

TESTS = """
import pytest


def test_always():
    pass


@pytest.mark.nightly
@pytest.mark.parametrize("case", [1, 2])
def test_seldom(case):
    pass


@pytest.mark.nightly_without_gpu
def test_seldom_where_kernels_are_interpreted():
    pass


@pytest.mark.nightly
@pytest.mark.lab("5.1")
def test_an_exercise():
    raise NameError("seen at night")  # which is compared with no known mistake
"""
LEFT_OUT = 3 + (not torch.cuda.is_available())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("nightly"))
    (checkout.root / "tests/phase_05/test_tried.py").write_text(TESTS)
    return checkout


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param([], id="one process"),
        pytest.param(["-n", "1"], id="in a process of its own", marks=pytest.mark.nightly),
    ],
)
def test_what_does_not_run_is_counted(checkout, processes):
    said = checkout.pytest("tests/phase_05/test_tried.py", *processes).stdout

    assert f"{LEFT_OUT} nightly tests not run: `make nightly`" in said
    assert f"{5 - LEFT_OUT} passed" in said


@pytest.mark.nightly
def test_they_run_when_asked_for(checkout):
    said = checkout.pytest("tests/phase_05/test_tried.py", "-m", "nightly", "-n", "2").stdout

    assert f"1 failed, {LEFT_OUT - 1} passed" in said
    assert "not run" not in said


def test_a_grade_counts_them(checkout):
    checkout.solve("5.1")

    said = checkout.lab("check", "5.1").stdout

    assert "✗ 5.1" in said
    assert "seen at night" in said
