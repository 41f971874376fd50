"""Grades exercises: the learner's code for one at a time, ours for all others."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.kit.forks import Job, Outcome, Result, run
from labs.kit.path import counts, track_of
from labs.kit.progress import digest, has_stub, is_untouched, learners_exercise
from labs.kit.regions import Exercise, LabError, sort_key


@dataclass(frozen=True)
class Grade:
    """state: passed, failed or todo; digest: of the code that was graded"""

    exercise: Exercise
    state: str
    outcome: Outcome
    digest: str

    @property
    def points(self) -> int:
        return int(self.state == "passed")

    @property
    def message(self) -> str:
        """Why it did not pass, in a few lines; empty where that needs no saying."""
        failed = [result.message for result in self.outcome.of("failed")]
        return self.outcome.trouble or (failed[0] if failed else "")


def grade(
    exercises: Iterable[Exercise],
    trace: bool = False,
    on_test: Callable[[Job, Result], None] | None = None,
    on_wait: Callable[[Job, str, float, float], None] | None = None,
) -> Iterator[Grade]:
    """As they come: first those that need no tests to tell.

    trace             messages are whole tracebacks
    on_test, on_wait  see `labs.kit.forks.run`
    """
    jobs: list[Job] = []
    for exercise in exercises:
        if is_untouched(exercise):
            yield Grade(exercise, "todo", Outcome(), "")
            continue
        try:
            sources = learners_exercise(exercise)
            jobs.append(Job((exercise, digest(exercise)), exercise.number, sources, trace=trace))
        except LabError as error:
            yield Grade(exercise, "failed", Outcome(trouble=str(error)), "")
    for job, outcome in run(jobs, on_test, on_wait=on_wait) if jobs else ():
        state = "passed" if outcome.passed else "todo" if has_stub(job.key[0]) else "failed"
        yield Grade(job.key[0], state, outcome, job.key[1])


def report(grades: list[Grade]) -> dict[str, Any]:
    """For instructors: points of every exercise, of every track, and in all."""
    exercises = [
        {
            "exercise": grade.exercise.number,
            "title": grade.exercise.title,
            "phase": grade.exercise.phase,
            "track": track_of(grade.exercise),
            "state": grade.state,
            "points": grade.points,
            "of": 1,
            "tests": Counter(result.outcome for result in grade.outcome.results),
            "seconds": round(grade.outcome.seconds, 2),
            "message": grade.message,
        }
        for grade in sorted(grades, key=lambda grade: sort_key(grade.exercise.number))
    ]
    tracks = counts([(entry["track"], entry["points"] == 1) for entry in exercises])
    return {
        "points": sum(grade.points for grade in grades),
        "of": len(grades),
        "tracks": {track: {"points": points, "of": of} for track, (points, of) in tracks.items()},
        "exercises": exercises,
    }


def write_junit(reports: dict[str, dict[str, Any]], path: Path) -> None:
    """Reports in JUnit's XML, a suite for each, an exercise a test case.   reports: by the name of their suite"""
    suites = ElementTree.Element("testsuites")
    for name, points in reports.items():
        lost = points["of"] - points["points"]
        suite = ElementTree.SubElement(
            suites, "testsuite", name=_xml(name), tests=str(points["of"]), failures=str(lost)
        )
        for entry in points["exercises"]:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=entry["phase"],
                name=f"{entry['exercise']} {entry['title']}",
                time=str(entry["seconds"]),
            )
            if not entry["points"]:
                failure = ElementTree.SubElement(case, "failure", type=entry["state"])
                failure.text = _xml(entry["message"] or entry["state"])
    root = suites if len(reports) != 1 else suites[0]
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
