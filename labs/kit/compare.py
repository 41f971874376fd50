"""The same program on the learner's engine and on ours: which step is the first that differs, and why."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from labs.kit.alignment import Step, align, differences
from labs.kit.regions import LabError
from minivllm.observe.page import build_page, run_of

# Seconds, and parts of what ours took, after which the learner's engine is not waited for any longer.
LEAST_LIMIT, LIMIT = 60.0, 5.0
LOOK = 1.0  # seconds between looks at how far a program is

# Called with what is being done, and how far it is.
Tell = Callable[[str, str], object]


@dataclass
class Recorded:
    """What a program's engine did.

    room   as of `minivllm.observe.recorder.room`
    end    what ended the program too early; None = nothing did
    said   the last line of its standard error
    """

    name: str
    steps: list[Step] = field(default_factory=list)
    room: dict[str, int] = field(default_factory=dict)
    end: str | None = None
    said: str = ""
    seconds: float = 0.0

    @property
    def ending(self) -> str:
        """Why it took no further step."""
        if self.end is None:
            return f"{self.name} takes no further step: it is done"
        return f"{self.name} takes no further step: {self.end}" + (
            f"; it says: {self.said}" if self.said else ""
        )


@dataclass(frozen=True)
class Comparison:
    """Which steps stand side by side, and where the two begin to differ.

    pairs     of `align`
    column    the first pair that differs; None if there is none
    reasons   why, in sentences
    """

    yours: Recorded
    ours: Recorded
    pairs: list[tuple[int | None, int | None]]
    column: int | None
    reasons: list[str]

    @property
    def verdict(self) -> str:
        steps = len(self.ours.steps)
        if self.column is None:
            return f"Your engine does what ours does in all {steps} steps: the same rows, slots, logits and tokens."
        return f"Step {self.column} is the first that differs, of {steps} in ours."

    @property
    def differing(self) -> list[int]:
        """The columns in which the two are not alike."""
        return [column for column, pair in enumerate(self.pairs) if not self._is_alike(*pair)]

    def _is_alike(self, mine: int | None, theirs: int | None) -> bool:
        if mine is None or theirs is None:
            return False
        return not differences(self.yours.steps[mine], self.ours.steps[theirs])

    def page(self, command: str) -> str:
        """Both timelines as one HTML page."""
        difference = None if self.column is None else {"column": self.column, "reasons": self.reasons}
        return build_page(
            f"Your engine beside ours: {command}",
            [run_of(run.name, map(_shown, run.steps), run.room) for run in (self.yours, self.ours)],
            columns=self.pairs,
            differs=self.differing,
            difference=difference,
            verdict=self.verdict,
        )


def _shown(step: Step) -> Step:
    """What the page shows of a step: no logits, whose nan is no JSON."""
    return {name: value for name, value in step.items() if name != "logits"}


def compare(yours: Recorded, ours: Recorded) -> Comparison:
    """LabError if our engine took no step: then there is nothing to compare with."""
    if not ours.steps:
        raise LabError(f"the program makes our engine take no step; {ours.ending}")
    pairs = align(yours.steps, ours.steps)
    for column in range(max(len(yours.steps), len(ours.steps))):
        if column >= len(yours.steps):
            return Comparison(yours, ours, pairs, column, [yours.ending])
        if column >= len(ours.steps):
            return Comparison(yours, ours, pairs, column, [ours.ending])
        if reasons := differences(yours.steps[column], ours.steps[column]):
            return Comparison(yours, ours, pairs, column, reasons)
    if yours.end != ours.end:
        return Comparison(yours, ours, pairs, len(pairs) - 1, [yours.ending])
    return Comparison(yours, ours, pairs, None, [])


def record(
    name: str,
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    limit: float = math.inf,
    tell: Callable[[str], object] = lambda so_far: None,
) -> Recorded:
    """Run a Python program and keep what its engine does. What it prints goes into `folder`.

    limit   seconds after which it is ended; this process's own end is its end, too
    tell    called once a second with how far it is
    """
    file, started = folder / f"{name}.jsonl", time.monotonic()
    file.unlink(missing_ok=True)
    is_late = False
    with open(folder / f"{name}.out", "w") as out, open(folder / f"{name}.err", "w") as err:
        program = subprocess.Popen(
            [sys.executable, "-m", "labs.kit.recording", str(os.getpid()), str(file), *command],
            env={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)), **environment},
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while program.poll() is None and not is_late:
                seconds = time.monotonic() - started
                tell(f"{steps_in(file)} steps, {seconds:.0f} s")
                with suppress(subprocess.TimeoutExpired):
                    program.wait(min(LOOK, limit))
                is_late = program.poll() is None and time.monotonic() - started > limit
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
    recorded = read(name, file)
    recorded.seconds = time.monotonic() - started
    recorded.said = _last_line(folder / f"{name}.err")
    if is_late:
        recorded.end = f"it had not ended after {limit:.0f} s"
    elif program.returncode and recorded.end is None:
        recorded.end = f"it ended with exit status {program.returncode}"
    return recorded


def steps_in(file: Path) -> int:
    """How many were written so far, but for the lines of other things, which stand before them and after them."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    return sum(not line.startswith((b'{"room"', b'{"end"')) for line in lines)


def read(name: str, file: Path) -> Recorded:
    """What `labs.kit.recording` wrote. A last line that was cut off does not count."""
    recorded = Recorded(name)
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    for entry in map(json.loads, lines):
        if "room" in entry:
            recorded.room = entry["room"]
        elif "end" in entry:
            recorded.end = entry["end"]
        else:
            recorded.steps.append(entry)
    return recorded


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().split("\n")
    return lines[-1].strip()


def compare_program(
    command: list[str], yours: Mapping[str, str], ours: Mapping[str, str], folder: Path, tell: Tell
) -> Comparison:
    """Run a program on both engines, ours first.

    yours, ours   the environments that choose the engine
    tell          called before what takes long, and while it does
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = record("ours", command, ours, folder, tell=partial(tell, "our engine runs"))
    if not first.steps:
        raise LabError(f"'{' '.join(command)}' makes our engine take no step; {first.ending}")
    limit = max(LEAST_LIMIT, LIMIT * first.seconds)
    second = record("yours", command, yours, folder, limit, partial(tell, "your engine runs"))
    tell("comparing", f"{len(second.steps)} steps with {len(first.steps)}")
    return compare(second, first)
