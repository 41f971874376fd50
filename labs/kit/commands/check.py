"""`lab check`, `lab debug` and `lab watch`."""

import re
import shlex
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from labs.demos import PICTURES
from labs.kit.commands import hunts
from labs.kit.commands.run import environment, show_picture
from labs.kit.commands.shared import SIGNS, WIPE, Number, Several, Which, choose, choose_one, console
from labs.kit.hunt import choose_hunts, is_hunt
from labs.kit.path import TRACKS, is_needed, label, mark, named, next_of, track_of
from labs.kit.progress import Progress, digest, is_untouched, learners_exercise, place, shown
from labs.kit.regions import ROOT, Exercise, LabError
from labs.kit.surroundings import complaint

if TYPE_CHECKING:
    from labs.kit.forks import Job, Result
    from labs.kit.grade import Grade

MOST_LINES = 20  # of what a test's code has printed

Trace = Annotated[bool, typer.Option("--trace", help="Whole tracebacks.")]
Pdb = Annotated[
    bool, typer.Option("--pdb", help="Of one exercise: a debugger at breakpoint() and where a test fails.")
]


def check(which: Several = None, trace: Trace = False, pdb: Pdb = False) -> None:
    """Run the tests of exercises on your code. Exit status 1 unless all pass, but for side tracks not begun."""
    if pdb:
        raise typer.Exit(debug(choose_one(" ".join(which or ()))))
    hunted = [hunt for each in which or () if is_hunt(each) for hunt in choose_hunts(each)]
    asked = [each for each in which or (None,) if not is_hunt(each)]
    chosen = list({exercise.number: exercise for each in asked for exercise in choose(each)}.values())
    passed = hunts.check_hunts(hunted) if hunted else True
    if chosen:
        numbers = chosen[0].number if len(chosen) == 1 else f"{chosen[0].number} to {chosen[-1].number}"
        numbers = ", ".join(asked) if len(asked) > 1 else numbers
        console.print(f"Checking {numbers}: your code in labs/, ours for everything else")
        passed = check_all(chosen, trace) and passed
    raise typer.Exit(0 if passed else 1)


def debug_command(number: Number) -> None:
    """Run an exercise's tests in a debugger: it stops at breakpoint() and where a test fails."""
    raise typer.Exit(debug(choose_one(number)))


def debug(exercise: Exercise) -> int:
    """Run its tests in this terminal, up to the first that fails; the exit status."""
    from labs.kit.forks import test_files

    learners_exercise(exercise)  # says so where Python cannot read it
    number, files = exercise.number, [shown(path) for path in test_files(exercise.number)]
    command = ["pytest", "-x", "-s", "--pdb", "-m", "", "-p", "labs.kit.plugin", "--lab", number, *files]
    console.print(f"[dim]lab run --labs {number} -- {escape(shlex.join(command))}[/]")
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment(number)).returncode


def check_all(chosen: list[Exercise], trace: bool = False) -> bool:
    """Grade, say what came out, remember what passed; whether all did that have to.

    Of several exercises a side track that nobody has begun has to do nothing.
    """
    from labs.kit.grade import grade

    progress, states, explained = Progress(), {}, set()
    if console.is_terminal:
        print("loading PyTorch\r", end="", flush=True)  # wiped by the first test
    graded = grade(chosen, trace, say_test if console.is_terminal else None, say_wait)
    for result in in_order(graded, chosen):
        states[result.exercise.number] = result.state
        if say_grade(result, trace):
            explained.add(result.exercise.number)
        if result.state == "passed":
            progress.remember(result.exercise.number, result.digest)
    say_surroundings(chosen)
    if len(chosen) > 1:
        say_counts(chosen, states)
    left = [exercise for exercise in chosen if states[exercise.number] != "passed"]
    stuck = stuck_at(left, alone=len(chosen) == 1)
    progress.is_stuck_at(stuck.number if stuck else None)
    if stuck:
        console.print(f"[dim]stuck? lab hint {stuck.number}[/]")
        if states[stuck.number] == "failed" and stuck.number not in explained:
            console.print(
                f"[dim]what your code prints is shown; lab debug {stuck.number} stops at breakpoint() and where a test"
                f" fails; lab api {stuck.number} shows what you may use[/]"
            )
    if not left and len(chosen) == 1:
        number = chosen[0].number
        if track_of(chosen[0]) != "side":
            console.print(f"[dim]lab demo {number} shows what it changes[/]")
        console.print(f"[dim]lab diff {number} shows your code beside ours[/]")
    needed = [e for e in left if len(chosen) == 1 or is_needed(e) or not is_untouched(e)]
    if not needed:
        say_what_is_next(chosen, progress)
    return not needed


def say_surroundings(chosen: list[Exercise]) -> None:
    """Of each file: what is not as it was given outside its exercises, which may break one that was not checked."""
    for exercise in {exercise.starter: exercise for exercise in reversed(chosen)}.values():
        with suppress(
            LabError
        ):  # without its markers or its file nothing can be told, and the grade has said so
            if said := complaint(exercise):
                console.print(f"[yellow]{escape(said)}[/]")


def say_counts(chosen: list[Exercise], states: dict[str, str]) -> None:
    """A line for each path on which some of them are, for a newcomer need not go all of these."""
    on = {track: [states[e.number] for e in chosen if track_of(e) == track] for track in TRACKS}
    on = {track: found for track, found in on.items() if found}
    for track, found in on.items():
        whose = f"{label(track)}: " * (len(on) > 1)
        passed, failed, todo = map(found.count, ("passed", "failed", "todo"))
        console.print(f"{whose}{passed} passed, {failed} failed, {todo} TODO")


def say_what_is_next(passed: list[Exercise], progress: Progress) -> None:
    """After a pass: whether a phase is done with it, and the exercise that follows on the learner's path."""
    exercises = choose(None)
    states = {exercise.number: progress.state(exercise) for exercise in exercises}
    for phase in dict.fromkeys(exercise.phase for exercise in passed if is_needed(exercise)):
        own = [exercise for exercise in exercises if exercise.phase == phase]
        if all(states[exercise.number] == "passed" for exercise in own if is_needed(exercise)):
            beside = "" if all(map(is_needed, own)) else ", and its side tracks are yours to take or leave"
            console.print(f"[green]Phase {phase[:2]} is done[/]{beside}.")
            if (number := str(int(phase[:2]))) in PICTURES:
                show_picture(number)  # again at any time: lab demo 5
    following = next_of(exercises, states, progress.last)
    said = named(following) if following else "nothing more on the core path; lab shows what else there is"
    if following and progress.has_changed(following.number, states[following.number]):
        said += ", changed since it passed"
    console.print(f"Next: {escape(said)}")


def stuck_at(left: list[Exercise], alone: bool) -> Exercise | None:
    """Which of those that did not pass a hint is offered for: the first that was begun, else the first to begin.

    alone   it was asked for by its number. Beside the core path nobody is stuck who has not begun
    """
    begun = [exercise for exercise in left if not is_untouched(exercise)]
    ahead = [exercise for exercise in left if alone or track_of(exercise) == "core"]
    return next(iter(begun + ahead), None)


def in_order(grades: Iterable["Grade"], chosen: list[Exercise]) -> Iterator["Grade"]:
    """The grades in the order of the exercises, each as soon as those before it are there."""
    waiting, ahead = {}, deque(exercise.number for exercise in chosen)
    for result in grades:
        waiting[result.exercise.number] = result
        while ahead and ahead[0] in waiting:
            yield waiting.pop(ahead.popleft())


def say_test(job: "Job", result: "Result") -> None:
    """On a line that is wiped before the next."""
    name = f"{job.exercise} {result.test.rpartition('::')[2]}"[: console.width - 1]
    print(f"{WIPE}{name}\r", end="", flush=True)


def say_wait(job: "Job", test: str, seconds: float, computed: float) -> None:
    """Of a test that takes long: whoever waits knows for what, and that a busy machine fails nobody."""
    from labs.kit.limits import FACTOR, LEAST

    if console.is_terminal:
        print(WIPE, end="")
    console.print(
        f"[dim]{job.exercise} {escape(name_of(test))} is still running: in {seconds:.0f} s by the clock it has "
        f"computed for {computed:.0f} s. All tests together may compute for {LEAST:.0f} s, or {FACTOR:.0f} times as "
        f"long as on our code if that is more; time that other programs take from them does not count[/]"
    )


def say_grade(result: "Grade", trace: bool) -> bool:
    """Whether a known mistake was named, which says more than how to search for one."""
    if console.is_terminal:
        print(WIPE, end="")
    exercise, outcome = result.exercise, result.outcome
    tests = len(outcome.results)
    wrong = outcome.of("failed")
    said = {
        "passed": f"{tests} test{'s' * (tests != 1)}, {outcome.seconds:.1f} s",
        "failed": f"{len(wrong)} of {tests} tests fail" if wrong else "",
        "todo": f"TODO {place(exercise)}" + f", {len(wrong)} of {tests} tests fail" * bool(wrong),
    }[result.state]
    title = f"{escape(exercise.title)}[dim]{mark(exercise)}[/]"
    console.print(f"{SIGNS[result.state]} {exercise.number} {title}  [dim]{said}[/]")
    if outcome.trouble:
        console.print(f"    [red]{escape(outcome.trouble)}[/]")
    shown_messages, calls = set(), Counter(name_of(test.test) for test in wrong)
    for test in wrong:
        if test.message in shown_messages or len(shown_messages) == (1 if trace else 2):
            continue
        shown_messages.add(test.message)
        called = name_of(test.test)
        called = called if calls[called] == 1 else with_case(test.test)
        console.print(f"    [bold]{escape(called)}[/]")
        console.print("\n".join(f"      {line}" for line in test.message.split("\n")), markup=False)
        say_printed(test)
        yours = f"your code: {test.place}   " if test.place else ""
        console.print(f"      [dim]{yours}{f'asked in {test.asked}' * bool(test.asked)}[/]")
    talkative = [test for test in outcome.results if test.printed]
    if talkative and not wrong:
        console.print(f"    [bold]{escape(name_of(talkative[0].test))}[/]")
        say_printed(talkative[0])
    return bool(wrong or (outcome.trouble and outcome.results)) and not trace and say_mistakes(result)


def say_printed(test: "Result") -> None:
    """What the learner's code has printed in a test."""
    lines = test.printed.splitlines()
    for line in lines[:MOST_LINES]:
        console.print(f"      printed: {line}", markup=False)
    if len(lines) > MOST_LINES:
        console.print(f"      [dim]... {len(lines) - MOST_LINES} more lines[/]")


def with_case(test: str) -> str:
    """What a test is called within its file."""
    return test.partition("::")[2] or test


def name_of(test: str) -> str:
    """What a test is called; without its case where nobody has named that: `[ids0-missing0]`. A dtype is a name."""
    name, bracket, case = with_case(test).partition("[")
    parts = case.removesuffix("]").split("-")
    is_named = not all(re.fullmatch(r"(?!b?float\d|u?int\d)[a-z_]+\d+", part) for part in parts)
    return f"{name}{bracket}{case}" if is_named else name


def say_mistakes(result: "Grade") -> bool:
    """Which of the known mistakes it looks like; whether one is surely made. It takes a while, which is said first."""
    from labs.kit.likeness import is_plain, known_mistakes, likenesses

    known = known_mistakes(result.exercise)
    if not known or is_plain(result.outcome):
        return False
    console.print(
        f"    [dim]comparing with {len(known)} known mistakes[/]", end="\r" * console.is_terminal or "\n"
    )
    found = likenesses(known, result.outcome)
    if console.is_terminal:
        print(WIPE, end="")
    for likeness in found:
        if likeness.is_all:
            how = "It looks like this:"
        elif likeness.is_sure:
            how = f"Some of it looks like this ({likeness.explained:.0%} of what fails):"
        else:
            how = f"The nearest of the known mistakes, {likeness.alike:.0%} alike:"
        for mistake in likeness.mistakes:
            console.print(f"    [yellow]{how}[/] {escape(' '.join(mistake.misconception.split()))}")
    if not found:
        console.print(f"    [dim]It is none of the {len(known)} known mistakes.[/]")
    return any(likeness.is_sure for likeness in found)


def watch(which: Which = None) -> None:
    """Check what you have begun, and again whenever you save."""
    chosen = choose(which)
    saved, known = saved_at(chosen), {exercise.number: digest(exercise) for exercise in chosen}
    console.print(f"Watching {', '.join(sorted({f'labs/{e.phase}' for e in chosen}))}; Ctrl-C ends it")
    changed = [exercise for exercise in chosen if not is_untouched(exercise)]
    try:
        while True:
            if changed:
                check_all(changed)
            while (latest := saved_at(chosen)) == saved:
                time.sleep(0.2)
            before, saved = known, latest
            known = {exercise.number: digest(exercise) for exercise in chosen}
            changed = [e for e in chosen if known[e.number] != before[e.number] and not is_untouched(e)]
    except KeyboardInterrupt:
        console.print()


def saved_at(chosen: list[Exercise]) -> list[int]:
    files = sorted({exercise.starter for exercise in chosen})
    return [file.stat().st_mtime_ns for file in files if file.exists()]
