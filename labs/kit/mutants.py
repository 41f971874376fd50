"""The classic wrong answers: each must apply, change something, and be caught by its own exercise's tests."""

import tomllib
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from labs.kit.forks import NO_TEST, Job, Outcome
from labs.kit.in_place import run_changes
from labs.kit.overlay import Source, engine_file
from labs.kit.regions import ROOT, Exercise, LabError, edit


class Mutant(NamedTuple):
    """misconception: what somebody thinks whose code looks like this"""

    name: str
    exercise: Exercise
    misconception: str
    edits: list[tuple[str, str]]

    def sources(self) -> dict[str, Source]:
        """The exercise's module with the mistake in it. LabError when there is no such mistake to make."""
        try:
            text = edit(self.exercise, self.edits)
        except LabError as error:
            raise LabError(f"mutant {self.name} of lab {self.exercise.number}: {error}") from None
        path = f"{engine_file(self.exercise.module)} [{self.name}]"  # no such file: it is read from linecache
        return {self.exercise.module: Source(path, text)}


def mutants_of(exercise: Exercise) -> list[Mutant]:
    """In the order of their file. LabError for a file that is not as it should be."""
    path = ROOT / "labs" / exercise.phase / "mutants" / f"{exercise.number}.toml"
    if not path.is_file():
        return []
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
        return [
            Mutant(
                table["name"],
                exercise,
                table["misconception"],
                [(e["old"], e["new"]) for e in table.get("edit") or [table]],
            )
            for table in tables
        ]
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"{path.relative_to(ROOT)}: {error}") from None
    except KeyError as error:
        raise LabError(f"{path.relative_to(ROOT)}: a mutant has no {error}") from None


class Verdict(NamedTuple):
    """mutant: None for the exercise's tests on the engine as it is, which must pass"""

    exercise: str
    mutant: Mutant | None
    is_good: bool
    text: str


def picked(names: Iterable[str]) -> str:
    """One of them by a hash: the same in every run, and chosen by nobody."""
    return min(names, key=lambda name: zlib.crc32(name.encode()))


def check_mutants(
    exercises: Iterable[Exercise], engine_too: bool = True, sample: bool = False
) -> Iterator[Verdict]:
    """A verdict on each mutant of the exercises, and one on their tests on the engine, as they come.

    sample   of each exercise one mutant alone (`picked`)
    """
    jobs, names = [], set()
    for exercise in exercises:
        jobs += [Job(None, exercise.number, {})] * engine_too
        mutants = mutants_of(exercise)
        if sample and mutants:
            name = picked(mutant.name for mutant in mutants)
            mutants = [mutant for mutant in mutants if mutant.name == name]
        for mutant in mutants:
            try:
                if mutant.name in names:
                    raise LabError(f"two mutants are called {mutant.name}")
                names.add(mutant.name)
                jobs.append(Job(mutant, exercise.number, mutant.sources(), stop_at_first=True))
            except LabError as error:
                yield Verdict(exercise.number, mutant, False, str(error))
    for job, outcome in run_changes(jobs):
        judge = _judge_engine if job.key is None else _judge_mutant
        yield Verdict(job.exercise, job.key, *judge(outcome))


def _judge_engine(outcome: Outcome) -> tuple[bool, str]:
    wrong = outcome.trouble or next((r.test for r in outcome.of("failed", "todo")), "every test is skipped")
    passed = f"{len(outcome.of('passed'))} tests pass on the engine in {outcome.seconds:.1f} s"
    return outcome.passed, passed if outcome.passed else f"its tests fail on the engine: {wrong}"


def _judge_mutant(outcome: Outcome) -> tuple[bool, str]:
    if caught := outcome.of("failed"):
        file, _, test = caught[0].test.partition("::")
        return bool(test), f"caught by {test}" if test else f"breaks {file}: {caught[0].message}"
    if outcome.trouble and outcome.trouble != NO_TEST:
        return True, f"caught, but: {outcome.trouble}"
    return False, outcome.trouble or "SURVIVED"
