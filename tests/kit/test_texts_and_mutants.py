"""Every exercise has hints, a solution and mutants, and mutants are caught: here a sample, all in three nights."""

import ast
import re

import pytest
from checkout import Checkout, one_of_each

from labs.kit.forks import test_files as files_of
from labs.kit.hints import hints_of
from labs.kit.mutants import mutants_of
from labs.kit.overlay import engine_file
from labs.kit.regions import ROOT, read_engine
from tests.tools.nights import by_day, of_night

EXERCISES = read_engine()
each = pytest.mark.parametrize("number", EXERCISES)


@each
def test_an_exercise_has_tests_hints_and_a_solution(number):
    exercise = EXERCISES[number]
    hints = hints_of(exercise)
    solutions = (ROOT / "solutions" / exercise.phase / "README.md").read_text()
    part = re.search(rf"^## {number} .*?(?=^## |\Z)", solutions, re.DOTALL | re.MULTILINE)

    assert files_of(number)
    assert hints, "no hints"
    assert len(hints.hints) == 3
    assert all(hint.strip() for hint in hints.hints)
    assert 3 <= hints.minutes <= 120
    assert part, "no solution"
    assert f"<!-- code: lab {number} -->" in part[0]


@pytest.mark.parametrize("number", by_day(EXERCISES))
def test_an_exercise_has_mutants_each_of_which_finds_what_it_changes(number):
    """To run them all is slow. A region that has changed shows here."""
    exercise, mutants = EXERCISES[number], mutants_of(EXERCISES[number])

    assert mutants
    for mutant in mutants:
        assert mutant.sources()[exercise.module].text != engine_file(exercise.module).read_text(), mutant.name


@pytest.mark.nightly
@each
def test_no_two_mutants_are_the_same_code(number):
    """A learner would be told of one mistake twice, in other words."""
    exercise, by_code = EXERCISES[number], {}
    for mutant in mutants_of(exercise):
        code = ast.dump(ast.parse(mutant.sources()[exercise.module].text))
        by_code.setdefault(code, []).append(mutant.name)

    assert [names for names in by_code.values() if len(names) > 1] == []


def test_there_are_enough_mutants_and_each_has_a_name_of_its_own():
    names = [mutant.name for exercise in EXERCISES.values() for mutant in mutants_of(exercise)]

    assert len(names) >= 90
    assert len(names) == len(set(names))


# A mutant of two phases, nightly all of every third exercise.
SAMPLE = one_of_each(1, 7)


@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_mutant_is_caught_by_its_own_exercises_tests(tmp_path, sample):
    chosen = SAMPLE if sample else of_night(list(EXERCISES), 3)
    code = (
        "from labs.kit.mutants import check_mutants\n"
        "from labs.kit.regions import read_engine\n"
        f"chosen = [read_engine()[number] for number in {chosen}]\n"
        f"for verdict in check_mutants(chosen, engine_too=False, sample={sample}):\n"
        "    print(verdict.is_good, verdict.exercise, verdict.mutant.name, verdict.text)\n"
    )

    verdicts = Checkout(tmp_path).execute(code)

    lines = verdicts.stdout.strip().split("\n")
    assert verdicts.returncode == 0, verdicts.stderr
    every = sum(len(mutants_of(EXERCISES[number])) for number in chosen)
    assert len(lines) == (len(SAMPLE) if sample else every)
    assert [line for line in lines if not line.startswith("True")] == []
