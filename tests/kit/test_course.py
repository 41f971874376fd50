"""What holds for all exercises: each can be solved, fails before it is, and is looked after."""

import ast
import tomllib
from pathlib import Path

import pytest
from checkout import Checkout, one_of_each

from labs.kit.hints import hints_of
from labs.kit.path import TRACKS
from labs.kit.regions import PHASES, ROOT, find_regions, read_engine, splice
from labs.kit.sync import sync
from tests.tools import house

EXERCISES = read_engine()
SAMPLE = one_of_each(3, 13)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("course"))


def test_what_is_generated_is_up_to_date():
    assert sync(write=False)[0] == []


DROPPED = {"2.3", "2.4"}  # their numbers are not used again


def test_the_exercises_of_a_phase_are_numbered_without_gaps_but_for_those_that_were_dropped():
    assert DROPPED.isdisjoint(EXERCISES)
    for phase in (int(name[:2]) for name in PHASES):
        known = EXERCISES.keys() | DROPPED
        numbers = sorted(int(n.partition(".")[2]) for n in known if n.startswith(f"{phase}."))
        assert numbers == list(range(1, len(numbers) + 1))
        assert numbers


def test_the_core_path_has_three_to_five_exercises_a_phase_and_lies_in_the_core():
    tracks = {number: hints_of(exercise).track for number, exercise in EXERCISES.items()}
    core = [number for number, track in tracks.items() if track == "core"]
    files = {path.relative_to(ROOT) for path in house.core_files()}

    assert set(tracks.values()) <= TRACKS.keys()
    assert 21 <= len(core) <= 27
    for phase in (1, 2, 3, 5, 6, 7):
        assert 3 <= sum(number.startswith(f"{phase}.") for number in core) <= 5, f"phase {phase}"
    assert {number for number, track in tracks.items() if track == "kernels"} == {
        number for number in EXERCISES if number.startswith("4.")
    }
    assert [number for number in core if number.startswith("0.")] == ["0.1"]
    for number in core:
        if number == "0.1":
            continue  # the one file that stands beside the engine
        assert Path(EXERCISES[number].module.replace(".", "/") + ".py") in files, number
        assert (
            "track"
            in tomllib.loads((ROOT / "labs" / EXERCISES[number].phase / "hints.toml").read_text())[number]
        ), number


@pytest.mark.parametrize("number", EXERCISES)
def test_a_chapter_lists_an_exercise_among_those_of_its_track(number):
    exercise = EXERCISES[number]
    labs = (ROOT / "phases" / exercise.phase / "README.md").read_text().partition("\n## Labs\n")[2]
    path, _, beside = labs.partition("\n## Check yourself")[0].partition("[side track")

    is_beside = hints_of(exercise).track == "side"

    assert (f"\n| {number} |" in beside) == is_beside
    assert (f"\n| {number} |" in path) != is_beside


def test_the_course_and_the_first_hour_give_a_phase_the_minutes_of_its_exercises():
    """A reader plans with these pages, and the chapter's tables of labs say how long each exercise takes."""
    minutes = dict.fromkeys((name for name in PHASES if name[:2] not in ("00", "08")), 0)
    for exercise in EXERCISES.values():
        if exercise.phase in minutes:
            minutes[exercise.phase] += hints_of(exercise).minutes
    rows = (ROOT / "docs/course.md").read_text().splitlines()
    told = {row.split("/")[2]: row.rpartition("| ")[2] for row in rows if row.startswith("| [")}
    del told["08_incidents"]  # hunts; the row says what one takes

    assert told == {name: f"{total} |" for name, total in minutes.items()}
    first_hour = (ROOT / "docs/first-hour.md").read_text()
    assert f"the chapter counts {minutes['03_cpu_punica']} minutes for its six exercises" in first_hour


@pytest.mark.parametrize(
    "chosen", [SAMPLE, pytest.param(list(EXERCISES), marks=pytest.mark.nightly)], ids=len
)
def test_an_exercise_is_todo_on_a_fresh_starter(checkout, chosen):
    code = (
        "from labs.kit.forks import Job, run\n"
        "from labs.kit.overlay import learners_sources\n"
        f"for job, outcome in run([Job(None, n, learners_sources(n)) for n in {chosen}]):\n"
        "    print(job.exercise, len(outcome.of('todo')), len(outcome.of('failed')), outcome.trouble)\n"
    )
    lines = checkout.execute(code).stdout.strip().split("\n")

    assert sorted(line.split()[0] for line in lines) == sorted(chosen)
    for line in lines:
        _, todo, failed, trouble = line.split(" ", 3)
        assert trouble == "None", line
        assert int(todo) > int(failed), line


def test_starters_filled_with_the_regions_are_the_engine(checkout):
    for exercise in EXERCISES.values():
        starter = (checkout.root / exercise.starter.relative_to(ROOT)).read_text()
        filled, _ = splice(starter, exercise.text, (), exercise.number)

        assert without_todo(filled) == without_todo(exercise.text)
        assert [r.exercise for r in find_regions(starter, "")] == [
            r.exercise for r in find_regions(filled, "")
        ]


def without_todo(text):
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if ast.unparse(node) != "from labs.kit.overlay import Todo"]
    return ast.dump(tree)


@pytest.mark.nightly
def test_the_engine_made_of_filled_starters_generates_what_the_engine_does(checkout):
    checkout.forget()
    checkout.solve()

    result = checkout.pytest("tests/phase_07", labs="all")

    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
