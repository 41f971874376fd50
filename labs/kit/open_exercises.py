"""Open exercises: an interface, an oracle and a budget in the place of a recipe. What is counted decides.

A learner's file is `labs/NN_name/open_NAME.py`. It starts as our naive answer, which is right and misses the budget.
Ours are `solutions/NN_name/open_NAME_{naive,good,best}.py`. A judge, `labs.kit.judges.NAME`, runs each on fresh inputs.
"""

import importlib
import json
import multiprocessing
import os
import re
import resource
import secrets
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from labs.kit.judges import Refused
from labs.kit.limits import (
    ASK,
    LOOK,
    MOST,
    NO_END,
    PATIENCE,
    Watch,
    begin_session,
    kill_session,
    limit_memory,
    limit_of,
    room_to_report,
)
from labs.kit.open_rules import broken_rules
from labs.kit.overlay import read
from labs.kit.regions import ROOT, LabError
from labs.kit.sync import OPEN, OURS, sha256

ROUNDS = 2  # inputs that an answer is judged on; its worst count is what counts


class Verdict(NamedTuple):
    """count: None where the answer is refused; why: the reason then"""

    count: float | None
    why: str = ""


@dataclass(frozen=True)
class OpenExercise:
    """`OPEN` says which there are.   name: of the judge, and in the names of the files"""

    phase: str
    name: str

    @property
    def number(self) -> str:
        """Of its phase, such as `5`."""
        return str(int(self.phase.partition("_")[0]))

    @property
    def call(self) -> str:
        """What `lab open` calls it: its phase's number, or its own name if it is not the first of its phase."""
        first = next(name for name, phase in OPEN.items() if phase == self.phase)
        return self.number if self.name == first else self.name

    @property
    def key(self) -> str:
        """What it is called where exercises are listed."""
        return f"open {self.call}"

    @property
    def judge(self) -> Any:
        """The module that judges: TITLE, UNIT (what is counted), BUDGET (the most of it) and `judge`."""
        return importlib.import_module(f"labs.kit.judges.{self.name}")

    @property
    def title(self) -> str:
        """Read without running the judge, who imports torch."""
        text = (ROOT / "labs" / "kit" / "judges" / f"{self.name}.py").read_text(encoding="utf-8")
        return re.search(r'^TITLE = "(.*)"$', text, re.MULTILINE)[1]

    @property
    def file(self) -> Path:
        """The learner's."""
        return ROOT / "labs" / self.phase / f"open_{self.name}.py"

    def ours(self, which: str) -> Path:
        """One of our answers: "naive", "good" or "best"."""
        return ROOT / "solutions" / self.phase / f"open_{self.name}_{which}.py"

    @property
    def digest(self) -> str:
        return sha256(read(self.file))

    def state(self, passed: dict[str, str]) -> str:
        """todo, while the naive answer stands untouched; passed, if this very file met the budget; else started."""
        if self.digest == sha256(self.ours("naive").read_text(encoding="utf-8")):
            return "todo"
        return "passed" if passed.get(self.key) == self.digest else "started"

    def meets(self, verdict: Verdict) -> bool:
        return verdict.count is not None and verdict.count <= self.judge.BUDGET


def open_exercises(which: str | None = None) -> list[OpenExercise]:
    """That of a phase, such as `5`, the one of a name, or all. LabError where there is none."""
    found = [OpenExercise(phase, name) for name, phase in OPEN.items()]
    chosen = [exercise for exercise in found if which in (None, exercise.call, exercise.name)]
    if not chosen:
        calls = ", ".join(exercise.call for exercise in found)
        raise LabError(f"phase '{which}' has no open exercise: give one of {calls}")
    return chosen


def fresh_seed() -> int:
    """Nobody knows it before an answer is written."""
    return secrets.randbits(32)


def judge(exercise: OpenExercise, text: str, path: Path, seed: int) -> Verdict:
    """The worst count of an answer over `ROUNDS` inputs made from a seed, each in a process of its own."""
    if broken := broken_rules(text):
        return Verdict(None, broken[0])
    worst = Verdict(0.0)
    for n in range(ROUNDS):
        verdict = _judge_apart(exercise, text, path, seed + n)
        if verdict.count is None:
            return verdict
        worst = max(worst, verdict)
    return worst


def _judge_apart(
    exercise: OpenExercise, text: str, path: Path, seed: int, limit: float | None = None
) -> Verdict:
    """In a fork: what an answer does to its process stays there, and one that does not end is ended.

    limit   seconds that it may compute; None = by what our naive answer takes on the same input (`labs.kit.limits`)
    """
    judging = exercise.judge.judge  # its imports are here before the fork, so that forks start at once
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(judging, text, path, seed, sender), daemon=True)
    child.start()
    sender.close()
    watch = Watch(child.pid)
    try:
        while not receiver.poll(LOOK):
            watch.look()
            if limit is None and watch.is_late(ASK, PATIENCE):
                limit = limit_of(_seconds_of_ours(exercise, seed))
            seconds = MOST if limit is None else limit
            if what := watch.is_late(seconds, PATIENCE):
                return Verdict(None, f"{NO_END} {seconds:.0f} s of {what}")
        return Verdict(*json.loads(receiver.recv_bytes()))
    except EOFError:
        return Verdict(None, "its process ended before it was judged")
    finally:
        kill_session(child)
        child.join()


def _seconds_of_ours(exercise: OpenExercise, seed: int) -> float:
    """For which our naive answer computes."""
    path = exercise.ours("naive")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _judge_apart(exercise, read(path), path, seed, limit=MOST)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _child(judging: Callable[..., float], text: str, path: Path, seed: int, sender: Connection) -> None:
    begin_session()
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silence, descriptor)
    limit_memory()
    try:
        found = [float(judging(lambda: load(text, path), Random(seed))), ""]
    except Refused as error:
        found = [None, str(error)]
    except Exception as error:  # whatever an answer raises is a reason to refuse it
        where = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        line = f" (line {where[-1]})" if where else ""
        found = [None, f"{type(error).__name__}: {error}"[:400] + line]
    with room_to_report():
        sender.send_bytes(json.dumps(found).encode())


def load(text: str, path: Path) -> types.ModuleType:
    """An answer as a module, run from its text."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    return module


def leaderboard(exercise: OpenExercise, seed: int) -> dict[str, Verdict]:
    """The learner's answer and ours, on the same inputs."""
    files = {"yours": exercise.file} | {which: exercise.ours(which) for which in OURS}
    return {who: judge(exercise, read(path), path, seed) for who, path in files.items()}


def report(exercises: list[OpenExercise]) -> list[dict[str, Any]]:
    """For instructors: what became of each, apart from points."""
    entries = []
    for exercise in exercises:
        is_todo = exercise.state({}) == "todo"
        verdict = (
            Verdict(None) if is_todo else judge(exercise, read(exercise.file), exercise.file, fresh_seed())
        )
        entries.append(
            {
                "exercise": exercise.key,
                "title": exercise.title,
                "phase": exercise.phase,
                "state": "todo" if is_todo else "passed" if exercise.meets(verdict) else "failed",
                "count": verdict.count,
                "unit": exercise.judge.UNIT,
                "budget": exercise.judge.BUDGET,
                "message": verdict.why,
            }
        )
    return entries
