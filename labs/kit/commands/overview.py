"""`lab` alone: the path, how far along it you are, and what comes next."""

import typer
from rich.console import Console
from rich.markup import escape

from labs.kit.commands import hunts, opened
from labs.kit.commands.shared import SIGNS, choose, console
from labs.kit.engine_state import complaint, edited
from labs.kit.migrate import strays
from labs.kit.path import TRACKS, counts, is_needed, label, mark, named, next_of, track_of
from labs.kit.progress import Progress, place, shown
from labs.kit.regions import Exercise

# `lab doctor` says it by itself, and maintainers know what they edit.
ON_OUR_CODE = (None, "check", "watch", "grade", "hunt", "demo", "run", "compare", "notebook")
WHAT_NOW = """\
  lab run -- minivllm demo   the demo, served with your code
  lab compare                the same on our code, too: the first step that differs, if any
  lab hunt                   incidents of real servers: find the fault, mend it
  lab open                   open exercises: an interface and a budget, no recipe
{paths}
  docs/capstone.md           the end of the course: change one policy, and defend it with measurements
  Side tracks stand in the list above."""


def overview(context: typer.Context) -> None:
    """Your path through the course, and how far along it you are."""
    if context.invoked_subcommand not in ("migrate", "sync"):
        say_strays()
    if context.invoked_subcommand in ON_OUR_CODE:
        say_edits()
    if context.invoked_subcommand:
        return
    progress, exercises = Progress(), choose(None)
    states = {exercise.number: progress.state(exercise) for exercise in exercises}
    changed = {number for number, state in states.items() if progress.has_changed(number, state)}
    solved = counts([(track_of(e), states[e.number] == "passed") for e in exercises])
    said = [f"{done} of {of} {TRACKS[track]}" for track, (done, of) in solved.items()]
    console.print(f"{', '.join(said)} solved.")
    console.print(
        "✓ solved  ~ started  · TODO  (a number that is missing is not in use any more)\n"
        "A phase is done when all but its side tracks are solved. The core path leads to the engine.\n"
    )
    for phase in dict.fromkeys(exercise.phase for exercise in exercises):
        own = [exercise for exercise in exercises if exercise.phase == phase]
        solved_of = [states[exercise.number] == "passed" for exercise in own if is_needed(exercise)]
        is_done = f" {SIGNS['passed']} done" * all(solved_of)
        path = label(next(track_of(exercise) for exercise in own if is_needed(exercise)))
        console.print(f"[bold]{phase}[/]  {path}, {sum(solved_of)} of {len(solved_of)}{is_done}")
        for exercise in own:
            title = f"{escape(exercise.title)}[dim]{mark(exercise)}[/]"
            title += "  [yellow]changed since it passed[/]" * (exercise.number in changed)
            console.print(f"  {SIGNS[states[exercise.number]]} {exercise.number} {title}")
    hunts.say_count()
    opened.say_count()
    console.print()
    following = next_of(exercises, states, progress.last)
    say_next(following, following is not None and following.number in changed)


def say_edits() -> None:
    """On the other stream, too."""
    if said := complaint(edited() or []):
        Console(stderr=True).print(f"[yellow]{escape(said)}[/]", soft_wrap=True, highlight=False)


def say_strays() -> None:
    """On the other stream: `lab grade --json` prints nothing but JSON."""
    if found := strays():
        names = ", ".join(map(shown, found))
        Console(stderr=True).print(f"{names}: exercises have moved; run `lab migrate`", soft_wrap=True)


def other_paths(exercises: list[Exercise]) -> str:
    """A line for each path of a phase of its own: its first exercise, and its chapter."""
    first: dict[str, Exercise] = {}
    for exercise in exercises:
        first.setdefault(track_of(exercise), exercise)
    return "\n".join(
        f"  {f'lab check {first[track].number}':27}where {where.removeprefix('on ')} begins: "
        f"phases/{first[track].phase}/README.md"
        for track, where in TRACKS.items()
        if track in first.keys() - {"core", "side"}
    )


def say_next(exercise: Exercise | None, has_changed: bool = False) -> None:
    """What to do now.   has_changed: the exercise has passed, with other code"""
    if exercise is None:
        now = WHAT_NOW.format(paths=other_paths(choose(None)))
        console.print(f"[green]The core path is done.[/] An engine runs on your code. What now:\n{now}")
        return
    number = exercise.number
    console.print(f"Next: {escape(named(exercise))}")
    if has_changed:
        console.print(f"  changed since it passed: {place(exercise)}\n  lab check {number} checks it again")
        return
    console.print(f"  read:  phases/{exercise.phase}/README.md\n  write: {place(exercise)}")
    console.print(f"  lab check {number}    lab hint {number}    lab api {number}")
