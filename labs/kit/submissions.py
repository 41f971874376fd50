"""`lab grade --submissions DIR`: the starters of many students, each in a folder of its own, against this checkout."""

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from labs.kit.confine import require_confinement
from labs.kit.forks import Job, Outcome, run
from labs.kit.grade import Grade, report
from labs.kit.overlay import Source, compile_source
from labs.kit.progress import stubs
from labs.kit.refusals import check
from labs.kit.regions import Exercise, LabError, code_of, splice, unsolved
from labs.kit.sync import sha256

MEMORY = 4 << 30  # bytes that the tests of an exercise may allocate


def read_submissions(folder: Path) -> list[Path]:
    """A folder for each student. LabError where there is none."""
    found = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not found:
        raise LabError(
            f"{folder} holds no submissions; put the labs/ of each student into a folder of its own there"
        )
    return found


def source_of(exercise: Exercise, submission: Path) -> Source | None:
    """A student's module with ours for its other exercises, as `lab check` has it; None while the stub stands.

    LabError for what cannot be read, and for what an answer has no need to say.
    """
    inside = exercise.starter.relative_to(exercise.starter.parents[1])
    path = next((p for p in (submission / "labs" / inside, submission / inside) if p.is_file()), None)
    if path is None:
        return None
    number, where = exercise.number, str(inside)
    text, lines = splice(path.read_text("utf-8", "replace"), exercise.text, {number}, where)
    if code_of(text, number, where) == code_of(stubs(exercise), number, where):
        return None
    source = Source(str(path), text, lines)
    try:
        compile(compile_source(source), where, "exec", dont_inherit=True)
        check(text, f"{exercise.text}\nfrom labs.kit.overlay import Todo\n", where)
    except LabError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LabError(f"{where}: lab {number} cannot be read, {error}") from None
    return source


def grade_submissions(
    submissions: Iterable[Path],
    exercises: list[Exercise],
    memory: int = MEMORY,
    limit: float | None = None,
    on_grade: Callable[[str, Grade], None] = lambda student, grade: None,
) -> dict[str, dict[str, Any]]:
    """Student -> what `report` says. Whatever a submission does, it costs its own points alone.

    memory   bytes that the tests of an exercise may allocate
    limit    seconds that they may compute; None = by what they take on our code (`labs.kit.limits`)

    Every exercise of every student runs in a process of its own, confined (`labs.kit.confine`).
    Our own code is graded first, and likewise: an exercise passes where the same tests pass as there.
    """
    require_confinement()
    ours = {job.key: outcome for job, outcome in run(_jobs_of_ours(exercises, memory), limit=limit)}
    for number, outcome in ours.items():
        if not outcome.passed:
            raise LabError(f"our own code of lab {number} does not pass here: {why(outcome)}")
    grades: dict[str, list[Grade]] = {submission.name: [] for submission in submissions}
    jobs: list[Job] = []

    def note(student: str, grade: Grade) -> None:
        grades[student].append(grade)
        on_grade(student, grade)

    for submission in submissions:
        for exercise in exercises:
            try:
                source = source_of(exercise, submission)
            except (LabError, OSError) as error:
                note(submission.name, Grade(exercise, "failed", Outcome(trouble=str(error)), ""))
                continue
            if source is None:
                note(submission.name, Grade(exercise, "todo", Outcome(), ""))
            else:
                key = submission.name, exercise
                jobs.append(Job(key, exercise.number, {exercise.module: source}, memory=memory))
    for job, outcome in run(jobs, limit=limit) if jobs else ():
        student, exercise = job.key
        text = job.sources[exercise.module].text
        state = state_of(outcome, ours[exercise.number], exercise.number in unsolved(text))
        note(student, Grade(exercise, state, outcome, sha256(text)))
    return {student: report(found) for student, found in grades.items()}


def _jobs_of_ours(exercises: list[Exercise], memory: int) -> Iterator[Job]:
    return (Job(exercise.number, exercise.number, {}, memory=memory) for exercise in exercises)


def state_of(outcome: Outcome, ours: Outcome, has_stub: bool) -> str:
    """passed, failed or todo. Tests that ended otherwise than with our code were skipped, or left out."""
    if outcome.passed and {r[:2] for r in outcome.results} == {r[:2] for r in ours.results}:
        return "passed"
    if not outcome.trouble and not any(result.message for result in outcome.of("failed", "todo")):
        outcome.trouble = "not all tests were run to their end"
    return "todo" if has_stub else "failed"


def why(outcome: Outcome) -> str:
    """What is wrong, in a line."""
    return outcome.trouble or next(
        (result.message for result in outcome.of("failed", "todo")), "no test passes"
    )


def write_csv(reports: dict[str, dict[str, Any]], path: Path) -> None:
    """A line for each student and exercise, and so for each point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["student", "exercise", "track", "state", "points", "of", "message"])
        for student, points in reports.items():
            for entry in points["exercises"]:
                columns = (entry[key] for key in ("exercise", "track", "state", "points", "of", "message"))
                writer.writerow([_plain(student), *map(_plain, columns)])


def _plain(cell: object) -> object:
    """So that no spreadsheet takes it for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in tuple("=+-@\t\r") else cell
