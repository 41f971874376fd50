"""`lab demo`: what it prints comes from the code of the exercise."""

import os
from pathlib import Path

import pytest
from checkout import Checkout, one_of_each

from labs.demos import PICTURES
from labs.kit.mutants import mutants_of
from labs.kit.overlay import Overlay, Source
from labs.kit.path import track_of
from labs.kit.regions import read_engine
from tests.tools.forked import SERVER

EXERCISES = {number: e for number, e in read_engine().items() if track_of(e) != "side"}
SAMPLE = [*((number, number) for number in one_of_each(3, 6, 10, 13)), ("3.5", "3")]


def tell(number, sources, file):
    """In a process of its own: write the lines of a demo, and what broke it, if it broke."""
    os.environ["TRITON_INTERPRET"] = "1"
    Overlay(sources).install()
    from labs.demos import demo_of

    lines = []
    try:
        lines += demo_of(number)()
    except Exception as error:  # a mistake may break whatever it likes
        lines.append(f"{type(error).__name__}: {error}")
    file.write_text("\n".join(lines))


def lines_of(number, file: Path, sources: dict[str, Source] | None = None) -> list[str]:
    process = SERVER.Process(target=tell, args=(number, sources or {}, file))
    process.start()
    process.join()
    return file.read_text().splitlines()


@pytest.mark.parametrize(
    ("number", "demo"),
    [
        pytest.param(number, demo, marks=() if (number, demo) in SAMPLE else pytest.mark.nightly)
        for number in EXERCISES
        for demo in (number, number.partition(".")[0])
        if demo == number or demo in PICTURES
    ],
)
def test_a_demo_shows_what_a_classic_mistake_changes(number, demo, tmp_path):
    """That of the exercise, or the picture of its phase."""
    mistakes = mutants_of(EXERCISES[number])

    ours = lines_of(demo, tmp_path / "ours")

    assert 2 <= len(ours) <= 14
    assert demo == number or max(map(len, ours)) <= 160
    assert "Error: " not in ours[-1]
    assert any(lines_of(demo, tmp_path / m.name, m.sources()) != ours for m in mistakes), "it shows none"


# In the place of the phase's own tests, which take seconds. Nobody has solved 3.3.
PASSES = """
import pytest
from labs.kit.overlay import Todo


@pytest.mark.lab("3.3")
def test_is_not_solved():
    raise Todo("lab 3.3")
"""
PASSES += "".join(f'\n\n@pytest.mark.lab("3.{n}")\ndef test_{n}():\n    pass\n' for n in (1, 2, 4, 5, 6))


@pytest.fixture
def checkout(tmp_path):
    """One in which 3.3 alone is missing of phase 3."""
    checkout = Checkout(tmp_path)
    tests = tmp_path / "tests" / "phase_03"
    for path in tests.glob("test_*.py"):
        path.unlink()
    (tests / "test_passes.py").write_text(PASSES)
    checkout.solve("3.1", "3.2", "3.4", "3.5", "3.6")
    return checkout


def test_a_phase_that_is_done_is_drawn_by_the_learners_code(checkout):
    said = checkout.lab("check", "3")

    _, _, drawn = said.stdout.partition("Phase 03 is done")
    assert "phase 3, on your code, with ours for 3.3\n" in drawn
    assert "adapter 9 slot  0  ██▇▆▆▆▅▄▄▄▃▂▂▂▁·" in drawn and "ours prints the same" in drawn


@pytest.mark.nightly
def test_a_picture_is_drawn_at_any_time_and_shows_where_ours_differs(checkout):
    checkout.answer("3.1", ("slot_of_id[0] = -1", "slot_of_id[0] = 0"))
    wrong = checkout.lab("demo", "3")
    checkout.forget()
    untouched = checkout.lab("demo", "3")

    assert "column 0: 16, must be 0\n  ours:   adapter 0 slot -1  ················" in wrong.stdout
    assert untouched.stdout.startswith("phase 3, on our code\n")


@pytest.mark.nightly
def test_a_demo_runs_on_the_learners_code_once_it_is_there(tmp_path):
    checkout = Checkout(tmp_path)
    before = checkout.lab("demo", "2.2")
    checkout.solve("2.2")
    right = checkout.lab("demo", "2.2")
    checkout.answer("2.2", ("self.live_ranks[i][slot] = rank", "self.live_ranks[i][slot] = rank + 1"))
    after = checkout.lab("demo", "2.2")
    beside = checkout.lab("demo", "2.8")

    assert before.returncode == 1
    assert "TODO labs/02_lora_layers/slots.py:" in before.stdout
    assert after.returncode == 0
    assert "rank 2 follows: live rank 3\n  ours: rank 2 follows: live rank 2\n" in after.stdout
    assert "ours prints the same" not in after.stdout
    assert right.stdout.endswith("slot 0 was never written: zeros\nours prints the same\n")
    assert "ours:" not in right.stdout
    assert beside.returncode == 2
    assert "lab 2.8 is a side track, and has no demo" in beside.stderr
