"""`lab run`, `lab demo` and `lab compare`: programs on your code."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from labs.demos import PICTURES
from labs.kit import overlay
from labs.kit.commands.shared import SIGNS, Number, choose, choose_one, console
from labs.kit.path import track_of
from labs.kit.progress import Progress, has_stub, is_untouched, learners_exercise, place
from labs.kit.regions import ROOT, LabError

SELDOM = 10.0  # seconds between lines where each stays, since nobody reads a terminal


def run(
    command: Annotated[list[str], typer.Argument(help="Any command, such as `-- minivllm demo`.")],
    labs: Annotated[
        str | None, typer.Option(help="What is yours: 3,5 or 3.2 or all. None: what you began.")
    ] = None,
) -> None:
    """Run a command on your code, and ours for what you have not begun."""
    yours = labs or begun()
    console.print(f"yours: {yours or 'nothing yet, this is our code'}")
    if not labs and (left := unfinished()):
        console.print(f"ours: {left}, of which a part is still TODO")
    for sentence in overlay.describe(yours):
        console.print(sentence, markup=False, soft_wrap=True)
    try:
        status = subprocess.run(command, env=environment(yours)).returncode
    except OSError as error:
        raise LabError(f"'{command[0]}' cannot be run: {error.strerror}") from None
    raise typer.Exit(status)


def demo(number: Number) -> None:
    """The smallest visible thing that an exercise changes, on your code; of phases 3 to 6 a picture."""
    if number in PICTURES:
        raise typer.Exit(show_picture(number))
    exercise = choose_one(number)
    if track_of(exercise) == "side":
        raise LabError(f"lab {number} is a side track, and has no demo; `lab` shows what is on the core path")
    learners_exercise(exercise)  # says so where Python cannot read it
    if has_stub(exercise):
        console.print(f"{SIGNS['todo']} {number} {escape(exercise.title)}  [dim]TODO {place(exercise)}[/]")
        raise typer.Exit(1)
    console.print(f"[bold]lab {number}: {escape(exercise.title)}[/], on your code")
    sys.stdout.flush()
    raise typer.Exit(show_demo(number))


def show_picture(phase: str) -> int:
    """Draw what a phase does with all that the learner has written of it; the exit status of that program."""
    own = choose(phase)
    solved = [e.number for e in own if not is_untouched(e) and not has_stub(e)]
    left = [e.number for e in own if e.number not in solved]
    ours = f", with ours for {', '.join(left)}" if solved and left else ""
    console.print(f"[bold]phase {phase}[/], on {'your' if solved else 'our'} code{ours}")
    sys.stdout.flush()
    return show_demo(phase, ",".join(solved))


def show_demo(number: str, selection: str | None = None) -> int:
    """Print the demo's lines on the learner's code, with ours where they differ; the exit status of theirs.

    selection   what is the learner's, as MINIVLLM_LABS takes it; None: the exercise of that number
    """
    program = [sys.executable, "-m", "labs.demos", number]
    selection = number if selection is None else selection
    ours = subprocess.Popen(program, env=environment(""), cwd=ROOT, text=True, stdout=subprocess.PIPE)
    yours = subprocess.run(program, env=environment(selection), cwd=ROOT, text=True, stdout=subprocess.PIPE)
    lines, expected = yours.stdout.splitlines(), ours.communicate()[0].splitlines()
    for line, wanted in zip_longest(lines, expected):
        if line is not None:
            print(line)
        if line != wanted:
            console.print(f"  [yellow]ours:[/] {escape(wanted or 'no such line')}")
    if lines == expected:
        console.print("[dim]ours prints the same[/]")
    return yours.returncode


def compare_command(
    command: Annotated[
        list[str] | None, typer.Argument(help="A Python program; none: `-- minivllm demo`.")
    ] = None,
    labs: Annotated[str | None, typer.Option(help="What is yours, as for `lab run`.")] = None,
    folder: Annotated[Path, typer.Option(help="Where compare.html and both records go.")] = Path(
        "out/compare"
    ),
) -> None:
    """Run a program on your engine and on ours: the first step that differs, and why. Exit status 1 if one does."""
    from labs.kit.compare import compare_program

    command = command or ["minivllm", "demo"]
    yours = labs or begun()
    if not yours:
        raise LabError("nothing is yours yet; begin an exercise, or name some with --labs")
    console.print(f"yours: {yours}")
    with console.status("") as status:
        tell = Told(status.update, 0.0) if console.is_terminal else Told(console.print, SELDOM)
        found = compare_program(command, environment(yours), environment(""), folder, tell)
    for run in (found.ours, found.yours):
        console.print(f"{run.name}: {len(run.steps)} steps, {run.seconds:.1f} s with its start")
    colour = "green" if found.column is None else "yellow"
    console.print(f"[{colour}]{escape(found.verdict)}[/]")
    for reason in found.reasons:
        console.print(f"  {escape(reason)}")
    if left := not_passed(yours):
        console.print(
            f"[yellow]Of yours {', '.join(left)} did not pass as it is now, and a program need not come by what is "
            f"wrong; `lab check {' '.join(left)}` says it.[/]"
        )
    page = folder / "compare.html"
    page.write_text(found.page(" ".join(command)), encoding="utf-8")
    console.print(f"[dim]both, step by step: {escape(str(page))}[/]")
    raise typer.Exit(0 if found.column is None else 1)


class Told:
    """Says how far something is.   say: takes a line; every: seconds between lines about the same thing"""

    def __init__(
        self, say: Callable[[str], object], every: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._every, self._clock = say, every, clock
        self._what, self._at = "", 0.0

    def __call__(self, what: str, so_far: str) -> None:
        now = self._clock()
        if what != self._what or now - self._at >= self._every:
            self._what, self._at = what, now
            self._say(f"[dim]{what}: {so_far}[/]")


def begun() -> str:
    """The exercises that the learner has written, as MINIVLLM_LABS takes them; of what is TODO nothing can run."""
    return ",".join(e.number for e in choose(None) if not is_untouched(e) and not has_stub(e))


def unfinished() -> str:
    """Those of which a stub still stands."""
    return ", ".join(e.number for e in choose(None) if not is_untouched(e) and has_stub(e))


def not_passed(yours: str) -> list[str]:
    """The exercises of a selection that are begun and have not passed as they stand.   yours: as for `environment`"""
    wanted, progress = {item.strip() for item in yours.split(",")}, Progress()
    return [
        exercise.number
        for exercise in choose(None)
        if not wanted.isdisjoint({"all", exercise.number, exercise.number.partition(".")[0]})
        and progress.state(exercise) == "started"
    ]


def environment(yours: str) -> dict[str, str]:
    """This process's, with the learner's code for `yours`, and with this Python's programs before others.

    yours   as `labs.kit.overlay.learners_sources` takes it
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **overlay.environment(yours), "PATH": path}
