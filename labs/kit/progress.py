"""What a learner has done so far: in the files under `labs/`, and in `.lab/`, which git does not see."""

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labs.kit.overlay import STARTERS, Source, compile_source, learners_sources, read
from labs.kit.regions import ROOT, Exercise, LabError, code_of, read_engine, splice, unsolved
from labs.kit.sync import sha256

FOLDER = ROOT / ".lab"


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Progress:
    """passed: exercise -> hash of the code that passed, the latest last; hints: exercise -> how many were given

    checked: the exercise or hunt that was checked last without a pass; None if the last check passed

    Several commands may run beside each other: each reads the file again before it changes something in it.
    """

    def __init__(self) -> None:
        self.file = FOLDER / "progress.json"
        self._read()

    def _read(self) -> None:
        held: dict[str, Any] = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.passed: dict[str, str] = held.get("passed", {})
        self.hints: dict[str, int] = held.get("hints", {})
        self.checked: str | None = held.get("checked")

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, all of it is as the last command left it, and no other changes it."""
        FOLDER.mkdir(exist_ok=True)
        with (FOLDER / "progress.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            yield
            written = self.file.with_suffix(".new")
            held = {"passed": self.passed, "hints": self.hints, "checked": self.checked}
            written.write_text(json.dumps(held, indent=1))
            written.replace(self.file)  # at once, for those who only read

    @property
    def last(self) -> str | None:
        """The exercise that passed last."""
        return next(reversed(self.passed), None)

    def remember(self, number: str, digest: str) -> None:
        """This code of the exercise has passed."""
        with self.changing():
            self.passed.pop(number, None)
            self.passed[number] = digest

    def is_stuck_at(self, number: str | None) -> None:
        """This is what a check was about that did not pass; None: it passed."""
        with self.changing():
            self.checked = number

    def next_hint(self, number: str, of: int) -> int:
        """Which of so many hints is given now, which is noted: the last one again and again."""
        with self.changing():
            self.hints[number] = min(self.hints.get(number, 0) + 1, of)
        return self.hints[number]

    def has_changed(self, number: str, state: str) -> bool:
        """Whether it has passed, and its code is another now.   state: the exercise's, by `state`"""
        return number in self.passed and state == "started"

    def state(self, exercise: Exercise) -> str:
        """passed, if this very code did; todo, if the stub stands untouched; else started."""
        if is_untouched(exercise):
            return "todo"
        return "passed" if self.passed.get(exercise.number) == digest(exercise) else "started"


def learners_text(exercise: Exercise) -> str:
    """Its module with the learner's code for it and ours for its other exercises. LabError without markers."""
    return splice(read(exercise.starter), exercise.text, {exercise.number}, shown(exercise.starter))[0]


def digest(exercise: Exercise) -> str:
    try:
        return sha256(learners_text(exercise))
    except LabError as error:
        return str(error)


def is_untouched(exercise: Exercise) -> bool:
    """Whether the stub stands as it was generated."""
    if _is_as_generated(exercise.starter):
        return True
    try:
        return learners_code(exercise) == code_of(stubs(exercise), exercise.number, exercise.module)
    except LabError:
        return has_stub(exercise)  # our module cannot be read, or the learner's file has lost its markers


def _is_as_generated(path: Path) -> bool:
    """Whether a whole file is, by its hash: to make starters anew takes far longer than to hash them."""
    if not (STARTERS.is_file() and path.is_file()):
        return False
    recorded = json.loads(STARTERS.read_text(encoding="utf-8"))
    entry = recorded.get(path.relative_to(STARTERS.parent).as_posix(), {})
    return sha256(read(path)) == entry.get("sha256")


def has_stub(exercise: Exercise) -> bool:
    """Whether a part of it is still to do: one of its stubs stands, though the rest be solved."""
    try:
        return exercise.number in unsolved(learners_code(exercise))
    except LabError:
        return False


def learners_code(exercise: Exercise) -> str:
    return code_of(learners_text(exercise), exercise.number, shown(exercise.starter))


def stubs(exercise: Exercise) -> str:
    """The starter of its module."""
    return exercise.fresh


def learners_exercise(exercise: Exercise) -> dict[str, Source]:
    """What it is graded on. LabError, in a sentence, for a file that Python cannot read."""
    sources = learners_sources(exercise.number)
    for source in sources.values():
        try:
            compile(compile_source(source), source.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise LabError(f"{shown(exercise.starter)}:{error.lineno}: {error.msg}") from None
    return sources


def place(exercise: Exercise) -> str:
    """`file:line` where its first region begins in the learner's file."""
    marker = f"# region lab {exercise.number}:"
    lines = read(exercise.starter).split("\n")
    return f"{shown(exercise.starter)}:{next((n for n, line in enumerate(lines, 1) if marker in line), 1)}"


def reset(chosen: list[Exercise], whole_files: bool) -> list[Path]:
    """Put the stubs back, of these exercises or in whole files; returns where the files are kept that were."""
    kept = []
    for path in dict.fromkeys(exercise.starter for exercise in chosen):
        [*exercises] = [exercise for exercise in chosen if exercise.starter == path]
        fresh = stubs(exercises[0])
        if path.is_file():
            kept.append(keep(path, f"{path.parent.name}-{path.stem}"))
        if not whole_files:
            numbers = {exercise.number for exercise in exercises}
            others = {number for number in read_engine() if number not in numbers}
            fresh, _ = splice(read(path), fresh, others, shown(path))
        path.write_text(fresh, encoding="utf-8")
    return kept


def keep(path: Path, name: str) -> Path:
    """Copy a file to .lab/backup under a name and the time; returns the copy."""
    copy = FOLDER / "backup" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copy)
    return copy
