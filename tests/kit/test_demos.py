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
SAMPLE = one_of_each(3, 6, 10, 13)
SOME_NIGHTLY = [
    pytest.param(number, marks=() if number in SAMPLE else pytest.mark.nightly) for number in EXERCISES
]


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


@pytest.mark.parametrize("number", SOME_NIGHTLY)
def test_a_demo_shows_what_a_classic_mistake_changes(number, tmp_path):
    mistakes = mutants_of(EXERCISES[number])

    ours = lines_of(number, tmp_path / "ours")

    assert 2 <= len(ours) <= 14
    assert "Error: " not in ours[-1]
    assert any(lines_of(number, tmp_path / m.name, m.sources()) != ours for m in mistakes), "it shows none"


PICTURED = [number for number in EXERCISES if number.partition(".")[0] in PICTURES]


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n == "3.5" else pytest.mark.nightly) for n in PICTURED]
)
def test_a_phases_picture_shows_what_a_classic_mistake_changes(number, tmp_path):
    phase, mistakes = number.partition(".")[0], mutants_of(EXERCISES[number])

    ours = lines_of(phase, tmp_path / "ours")

    assert 2 <= len(ours) <= 14 and max(map(len, ours)) <= 160
    assert "Error: " not in ours[-1]
    assert any(lines_of(phase, tmp_path / m.name, m.sources()) != ours for m in mistakes), "it shows none"


def test_a_phase_that_is_done_is_drawn_by_the_learners_code(tmp_path):
    checkout = Checkout(tmp_path)
    untouched = checkout.lab("demo", "3")
    for number in ("3.1", "3.2", "3.4", "3.5", "3.6"):
        checkout.solve(number)
    right = checkout.lab("check", "3")
    checkout.answer("3.1", ("slot_of_id[0] = -1", "slot_of_id[0] = 0"))
    wrong = checkout.lab("demo", "3")

    assert untouched.stdout.startswith("phase 3, on our code\n")
    _, _, drawn = right.stdout.partition("Phase 03 is done")
    assert "phase 3, on your code, with ours for 3.3\n" in drawn
    assert "adapter 9 slot  0  ██▇▆▆▆▅▄▄▄▃▂▂▂▁·" in drawn and "ours prints the same" in drawn
    assert "column 0: 16, must be 0\n  ours:   adapter 0 slot -1  ················" in wrong.stdout


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
