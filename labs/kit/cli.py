"""The `lab` command. What takes long to import is imported after the first line is out."""

import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from labs.kit import hunt_command, open_command
from labs.kit.hints import hints_of
from labs.kit.hunt import PHASE as HUNTS
from labs.kit.hunt import Hunt, choose_hunts, is_hunt
from labs.kit.migrate import strays
from labs.kit.path import TRACKS, counts, mark, next_of, track_of
from labs.kit.progress import (
    Progress,
    digest,
    has_stub,
    is_untouched,
    learners_code,
    learners_exercise,
    place,
    reset,
    shown,
)
from labs.kit.regions import PHASES, Exercise, read_engine
from minivllm.labs import ROOT, LabError, starters
from minivllm.quiet import quiet_libraries

if TYPE_CHECKING:
    from labs.kit.forks import Job, Result
    from labs.kit.grade import Grade

quiet_libraries()
app = typer.Typer(help="Your path through the course.", add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)

MAINTAINERS = "For maintainers"  # a group of `lab --help`
WIPE = "\x1b[2K"  # what a terminal takes for: empty this line
SIGNS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "todo": "[yellow]·[/]", "started": "[yellow]~[/]"}
WHAT_NOW = """\
  lab run -- minivllm demo   the demo, served with your code
  lab compare                the same on our code, too: the first step that differs, if any
  lab hunt                   incidents of real servers: find the fault, mend it
  lab open                   open exercises: an interface and a budget, no recipe
  lab check 4.1              where the kernel path begins: phases/04_triton_sgmv/README.md
  lab check 9.1              where the serving path begins: phases/09_serving/README.md
  docs/capstone.md           the end of the course: change one policy, and defend it with measurements
  Side tracks stand in the list above."""

Which = Annotated[
    str | None, typer.Argument(help="A phase, such as 3, or an exercise, such as 3.2; none: all.")
]
Number = Annotated[str, typer.Argument(help="An exercise, such as 3.2.")]
Trace = Annotated[bool, typer.Option("--trace", help="Whole tracebacks.")]


def choose(which: str | None) -> list[Exercise]:
    """The exercises of a phase, one exercise, or all. LabError for what is neither."""
    starters()  # says so where there is no checkout
    exercises = read_engine()
    found = [e for number, e in exercises.items() if which in (None, number, number.partition(".")[0])]
    if not found:
        near = [n for n in exercises if n.partition(".")[0] == which.partition(".")[0]] or list(exercises)
        raise LabError(
            f"there is no lab '{which}': give a phase, 1 to {int(PHASES[-1][:2])}, or an exercise, "
            f"{near[0]} to {near[-1]}"
        )
    return found


def choose_one(number: str) -> Exercise:
    [first, *others] = choose(number)
    if others or first.number != number:
        raise LabError(f"{number} is a phase; name one exercise, such as {first.number}")
    return first


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Your path through the course, and how far along it you are."""
    if context.invoked_subcommand not in ("migrate", "sync"):
        say_strays()
    if context.invoked_subcommand:
        return
    progress, exercises = Progress(), choose(None)
    states = {exercise.number: progress.state(exercise) for exercise in exercises}
    solved = counts([(track_of(e), states[e.number] == "passed") for e in exercises])
    said = [f"{done} of {of} {TRACKS[track]}" for track, (done, of) in solved.items()]
    console.print(f"{', '.join(said)} solved.")
    console.print(
        "✓ solved  ~ started or changed since  · TODO  (a number that is missing is not in use any more)\n"
    )
    for phase in dict.fromkeys(exercise.phase for exercise in exercises):
        console.print(f"[bold]{phase}[/]")
        for exercise in (e for e in exercises if e.phase == phase):
            title = f"{escape(exercise.title)}[dim]{mark(exercise)}[/]"
            console.print(f"  {SIGNS[states[exercise.number]]} {exercise.number} {title}")
    hunt_command.say_count()
    open_command.say_count()
    console.print()
    say_next(next_of(exercises, states, progress.last))


def say_strays() -> None:
    """On the other stream: `lab grade --json` prints nothing but JSON."""
    if found := strays():
        names = ", ".join(map(shown, found))
        Console(stderr=True).print(f"{names}: exercises have moved; run `lab migrate`", soft_wrap=True)


def say_next(exercise: Exercise | None) -> None:
    if exercise is None:
        console.print(f"[green]The core path is done.[/] An engine runs on your code. What now:\n{WHAT_NOW}")
        return
    hints = hints_of(exercise)
    minutes = f", about {hints.minutes} minutes" if hints else ""
    console.print(f"Next: lab {exercise.number}, {escape(exercise.title)}{mark(exercise)}{minutes}")
    console.print(f"  {place(exercise)}\n  lab check {exercise.number}    lab hint {exercise.number}")


@app.command()
def check(which: Which = None, trace: Trace = False) -> None:
    """Run the tests of exercises on your code. Exit status 1 unless all pass."""
    if is_hunt(which):
        raise typer.Exit(0 if hunt_command.check_hunts(choose_hunts(which)) else 1)
    chosen = choose(which)
    numbers = chosen[0].number if len(chosen) == 1 else f"{chosen[0].number} to {chosen[-1].number}"
    console.print(f"Checking {numbers}: your code in labs/, ours for everything else")
    raise typer.Exit(0 if check_all(chosen, trace) else 1)


def check_all(chosen: list[Exercise], trace: bool = False) -> bool:
    """Grade, say what came out, remember what passed; whether all did."""
    from labs.kit.grade import grade

    progress, states = Progress(), {}
    for result in in_order(grade(chosen, trace, say_test if console.is_terminal else None), chosen):
        states[result.exercise.number] = result.state
        say_grade(result, trace)
        if result.state == "passed":
            progress.remember(result.exercise.number, result.digest)
    if len(chosen) > 1:
        counts = {state: list(states.values()).count(state) for state in ("passed", "failed", "todo")}
        console.print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['todo']} TODO")
    left = [exercise for exercise in chosen if states[exercise.number] != "passed"]
    if stuck := stuck_at(left, alone=len(chosen) == 1):
        console.print(f"[dim]stuck? lab hint {stuck.number}[/]")
    if not left and len(chosen) == 1:
        number = chosen[0].number
        if track_of(chosen[0]) != "side":
            console.print(f"[dim]lab demo {number} shows what it changes[/]")
        console.print(f"[dim]lab diff {number} shows your code beside ours[/]")
    return not left


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


def say_grade(result: "Grade", trace: bool) -> None:
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
    shown_messages = set()
    for test in wrong:
        if test.message in shown_messages or len(shown_messages) == (1 if trace else 2):
            continue
        shown_messages.add(test.message)
        console.print(f"    [bold]{escape(name_of(test.test))}[/]")
        console.print("\n".join(f"      {line}" for line in test.message.split("\n")), markup=False)
        yours = f"your code: {test.place}   " if test.place else ""
        console.print(f"      [dim]{yours}asked in {test.asked}[/]")
    if (wrong or (outcome.trouble and outcome.results)) and not trace:
        say_mistakes(result)


def name_of(test: str) -> str:
    """What a test is called; without its case where nobody has named that: `[ids0-missing0]`."""
    name, bracket, case = (test.partition("::")[2] or test).partition("[")
    is_named = not all(re.fullmatch(r"[a-z_]+\d+", part) for part in case.removesuffix("]").split("-"))
    return f"{name}{bracket}{case}" if is_named else name


def say_mistakes(result: "Grade") -> None:
    """Which of the known mistakes it looks like. That takes a while, so it is said first."""
    from labs.kit.likeness import known_mistakes, likenesses

    known = known_mistakes(result.exercise)
    if not known:
        return
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


@app.command()
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


@app.command()
def hint(number: Number) -> None:
    """The next of three hints: a nudge, the approach, pseudocode."""
    if is_hunt(number):
        hunt_command.hint(only_hunt(number))
        return
    exercise, progress = choose_one(number), Progress()
    hints = hints_of(exercise)
    if not hints:
        raise LabError(f"there are no hints for lab {number} yet")
    given = min(progress.hints.get(number, 0) + 1, len(hints.hints))
    progress.hints[number] = given
    progress.save()
    console.print(f"[bold]Hint {given} of {len(hints.hints)}, lab {number}: {escape(exercise.title)}[/]")
    console.print(hints.hints[given - 1].strip("\n"), markup=False)


def only_hunt(number: str) -> Hunt:
    """LabError for the number of their phase."""
    [first, *others] = choose_hunts(number)
    if others:
        raise LabError(f"{number} is a phase; name one hunt, such as {first.number}")
    return first


@app.command(context_settings={"ignore_unknown_options": True})
def hunt(
    number: Annotated[str | None, typer.Argument(help="A hunt, such as 7; none: all of them.")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(help="Run it on the broken engine, such as `-- pytest FILE`.")
    ] = None,
    grade_it: Annotated[bool, typer.Option("--check", help="Grade your test, and then your fix.")] = False,
    spoil: Annotated[bool, typer.Option("--spoil", help="Show what was broken.")] = False,
) -> None:
    """An incident of a real server: its symptom, and an engine with that fault in it."""
    if number is None:
        return hunt_command.list_hunts()
    hunt = only_hunt(f"8.{number.removeprefix('8.')}")
    if command:
        raise typer.Exit(hunt_command.run_broken(hunt, command))
    if grade_it:
        raise typer.Exit(0 if hunt_command.check_hunts([hunt]) else 1)
    return (hunt_command.spoil if spoil else hunt_command.tell)(hunt)


@app.command("open")
def open_exercise(
    which: Annotated[str | None, typer.Argument(help="A phase, such as 5; none: all of them.")] = None,
) -> None:
    """Judge your answer to a phase's open exercise beside ours. Exit status 1 if it misses the budget."""
    if which is None:
        return open_command.list_open()
    raise typer.Exit(0 if open_command.judge_open(which) else 1)


@app.command()
def diff(
    number: Number, spoil: Annotated[bool, typer.Option("--spoil", help="Also before you pass.")] = False
) -> None:
    """Your code beside ours."""
    if is_hunt(number):
        raise LabError(f"`lab hunt {only_hunt(number).id} --spoil` shows what was broken")
    exercise = choose_one(number)
    if not spoil and Progress().state(exercise) != "passed":
        raise LabError(
            f"lab {number} has not passed as it is now; `lab check {number}`, or --spoil to see ours"
        )
    yours, ours = (
        Syntax(code, "python", theme="ansi_dark", word_wrap=True)
        for code in (learners_code(exercise), exercise.code())
    )
    if console.width >= 160:
        table = Table("yours", "ours")
        table.add_row(yours, ours)
        Console().print(table)
    else:
        Console().print("[bold]yours[/]", yours, "[bold]ours[/]", ours)
    console.print(f"[dim]why it is so: solutions/{exercise.phase}/README.md[/]")


@app.command("reset")
def reset_command(
    number: Annotated[str, typer.Argument(help="An exercise, such as 3.2; or a phase: all of its files.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Put the stub back. What was there is kept under .lab/backup."""
    if is_hunt(number):
        hunts = choose_hunts(number)
        if not yes and not typer.confirm(f"Put back {'all hunts' if number == '8' else f'hunt {number}'}?"):
            raise typer.Exit(1)
        for path in hunt_command.reset(hunts):
            console.print(f"kept: {shown(path)}")
        return
    chosen = choose(number)
    is_phase = "." not in number
    what = f"all of labs/{chosen[0].phase}" if is_phase else f"lab {number} in {shown(chosen[0].starter)}"
    if not yes and not typer.confirm(f"Put back {what} as it was at the start?"):
        raise typer.Exit(1)
    for path in reset(chosen, whole_files=is_phase):
        console.print(f"kept: {shown(path)}")


@app.command()
def migrate() -> None:
    """After an update: carry your answers to where their exercises are now. Your old files are kept."""
    from labs.kit.migrate import migrate as carry

    starters()  # says so where there is no checkout
    for sentence in carry() or ["every exercise is where it belongs"]:
        console.print(escape(sentence))


@app.command(context_settings={"ignore_unknown_options": True})
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
    try:
        status = subprocess.run(command, env=environment(yours)).returncode
    except OSError as error:
        raise LabError(f"'{command[0]}' cannot be run: {error.strerror}") from None
    raise typer.Exit(status)


@app.command()
def demo(number: Number) -> None:
    """After an exercise: the smallest visible thing that it changes, on your code."""
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


def show_demo(number: str) -> int:
    """Print the demo's lines on the learner's code, with ours where they differ; the exit status of theirs."""
    program = [sys.executable, "-m", "labs.demos", number]
    ours = subprocess.Popen(program, env=environment(""), cwd=ROOT, text=True, stdout=subprocess.PIPE)
    yours = subprocess.run(program, env=environment(number), cwd=ROOT, text=True, stdout=subprocess.PIPE)
    lines, expected = yours.stdout.splitlines(), ours.communicate()[0].splitlines()
    for line, wanted in zip_longest(lines, expected):
        if line is not None:
            print(line)
        if line != wanted:
            console.print(f"  [yellow]ours:[/] {escape(wanted or 'no such line')}")
    if lines == expected:
        console.print("[dim]ours prints the same[/]")
    return yours.returncode


def begun() -> str:
    """The exercises that the learner has written, as MINIVLLM_LABS takes them; of what is TODO nothing can run."""
    return ",".join(e.number for e in choose(None) if not is_untouched(e) and not has_stub(e))


def unfinished() -> str:
    """Those of which a stub still stands."""
    return ", ".join(e.number for e in choose(None) if not is_untouched(e) and has_stub(e))


def environment(yours: str) -> dict[str, str]:
    """This process's, with the learner's code for `yours`, and with this Python's programs before others."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "MINIVLLM_LABS": yours, "PATH": path}


@app.command("compare", context_settings={"ignore_unknown_options": True})
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
        found = compare_program(command, environment(yours), environment(""), folder, status.update)
    for run in (found.ours, found.yours):
        console.print(f"{run.name}: {len(run.steps)} steps, {run.seconds:.1f} s with its start")
    colour = "green" if found.column is None else "yellow"
    console.print(f"[{colour}]{escape(found.verdict)}[/]")
    for reason in found.reasons:
        console.print(f"  {escape(reason)}")
    page = folder / "compare.html"
    page.write_text(found.page(" ".join(command)), encoding="utf-8")
    console.print(f"[dim]both, step by step: {escape(str(page))}[/]")
    raise typer.Exit(0 if found.column is None else 1)


@app.command("read")
def read_command(
    phase: Annotated[str | None, typer.Argument(help="A phase, such as 5. None: where you are.")] = None,
    file: Annotated[int, typer.Argument(help="Which of vLLM's files to open, from 1.")] = 1,
    vllm: Annotated[Path | None, typer.Option(help="A checkout of vLLM; none: the installed one.")] = None,
) -> None:
    """What of vLLM to read beside a phase. Your editor opens the file if vLLM is at hand."""
    from labs.kit import reading

    found, folder = reading.reading_of(phase_of(phase)), reading.vllm_folder(vllm)
    console.print(found.text, markup=False)
    console.print()
    for number, (name, mentioned) in enumerate(found.files.items(), 1):
        where = reading.place_of(name, folder) if folder else f"{reading.ONLINE}/{name}"
        console.print(f"[bold]{number}[/] {escape(str(where))}")
        for said in reading.names_in(name, mentioned, folder):
            console.print(f"    {escape(said)}")
    if folder is None:
        console.print(f"vLLM is not installed here; name a checkout of {reading.VERSION} with --vllm")
        return
    if (version := reading.version_of(folder)) not in (None, reading.VERSION.removeprefix("v")):
        console.print(f"[yellow]this is vLLM {version}; chapters are about {reading.VERSION}[/]")
    if not 1 <= file <= len(found.files):
        raise LabError(f"there is no file {file}; give a number from 1 to {len(found.files)}")
    if console.is_terminal and not reading.open_in_editor(
        reading.place_of(list(found.files)[file - 1], folder)
    ):
        console.print("[dim]set EDITOR, and it opens there[/]")


@app.command()
def notebook(
    phase: Annotated[str | None, typer.Argument(help="A phase, such as 3. None: where you are.")] = None,
    jupyter: Annotated[
        list[str] | None, typer.Argument(help="Options of JupyterLab, such as `-- --port 9000`.")
    ] = None,
    engine: Annotated[bool, typer.Option("--engine", help="On our code alone.")] = False,
    labs: Annotated[str | None, typer.Option(help="What is yours, as for `lab run`.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start your copy over; the old one is kept.")
    ] = False,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Open your copy of a phase's notebook in JupyterLab, on your code for what you began."""
    from labs.kit.notebook import command, learners_copy, require_jupyterlab

    require_jupyterlab()
    yours = "" if engine else labs or begun()
    path, is_new = learners_copy(phase_of(phase), fresh)
    state = "a copy of ours" if is_new else "as you left it; --fresh starts it over"
    console.print(f"notebook: {shown(path)} ({state})")
    console.print(f"yours: {yours or 'nothing, this is our code'}; ours: all else")
    console.print("After a change in labs/ restart the kernel. Ctrl-C here ends JupyterLab.")
    sys.stdout.flush()
    arguments = command(path, jupyter or [], browser)
    os.execve(arguments[0], arguments, environment(yours))  # so that Ctrl-C is JupyterLab's to answer


def phase_of(which: str | None) -> str:
    """The phase of an exercise or a number; of the next exercise to solve, if none is given."""
    if is_hunt(which):
        return HUNTS
    progress, chosen = Progress(), choose(which)
    ahead = next_of(chosen, {e.number: progress.state(e) for e in chosen}, progress.last)
    return (ahead or chosen[-1]).phase


@app.command()
def doctor() -> None:
    """Whether everything is there that the course needs."""
    from labs.kit.doctor import examine

    is_well = True
    for finding in examine():
        is_well &= finding.is_good is not False
        sign = {True: SIGNS["passed"], False: SIGNS["failed"], None: "[yellow]-[/]"}[finding.is_good]
        console.print(f"{sign} {finding.name}: {escape(finding.text)}")
    raise typer.Exit(0 if is_well else 1)


@app.command("grade", rich_help_panel="For instructors")
def grade_command(
    which: Which = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit's XML here too.")] = None,
    submissions: Annotated[
        Path | None, typer.Option(help="A folder with a student's labs/ in each of its folders.")
    ] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Of submissions: write CSV here too.")] = None,
) -> None:
    """Points for every exercise."""
    from labs.kit.grade import grade, report, write_junit

    if submissions is not None:
        reports = grade_all(submissions, which, table)
    elif is_hunt(which):
        reports = {"minivllm labs": hunt_command.report(which)}
    else:
        points = report(list(grade(choose(which))))
        reports = {"minivllm labs": {**points, "open": open_command.grades(which)}}
    if junit:
        write_junit(reports, junit)
    if as_json:
        print(json.dumps(reports if submissions is not None else reports["minivllm labs"], indent=2))
        return
    for student, points in reports.items():
        say_points(points) if submissions is None else say_sums(student, points)


def grade_all(folder: Path, which: str | None, table: Path | None) -> dict[str, dict]:
    """Student -> points; what comes in between is said on the other stream, as each is graded."""
    from labs.kit.submissions import grade_submissions, read_submissions, write_csv

    chosen, found = choose(which), read_submissions(folder)
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    aside.print(f"{len(found)} submissions, {len(chosen)} exercises each; our own code is graded first")
    reports = grade_submissions(
        found,
        chosen,
        on_grade=lambda name, g: aside.print(f"{SIGNS[g.state]} {escape(name)} {g.exercise.number}"),
    )
    if table:
        write_csv(reports, table)
    return reports


def say_points(points: dict) -> None:
    for entry in points["exercises"]:
        sign = SIGNS[entry["state"]]
        console.print(f"{sign} {entry['exercise']} {escape(entry['title'])}  {entry['points']}/{entry['of']}")
    for track, part in points.get("tracks", {}).items():
        console.print(f"{part['points']} of {part['of']} points {TRACKS[track]}")
    console.print(f"{points['points']} of {points['of']} points")
    for entry in points.get("open", []):
        count = "" if entry["count"] is None else f"  {entry['count']:.4g} of {entry['budget']:g}"
        console.print(f"{SIGNS[entry['state']]} {entry['exercise']} {escape(entry['title'])}{count}")


def say_sums(student: str, points: dict) -> None:
    parts = [f"{part['points']} of {part['of']} {TRACKS[track]}" for track, part in points["tracks"].items()]
    console.print(f"{escape(student)}: {', '.join(parts)}")
    for entry in points["exercises"]:
        if entry["message"]:
            line = entry["message"].splitlines()[0]
            console.print(f"  {SIGNS[entry['state']]} {entry['exercise']}: {escape(line)}")


@app.command(rich_help_panel=MAINTAINERS)
def mutants(
    which: Which = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Of each exercise one mistake, by a hash.")
    ] = False,
    generic: Annotated[
        bool, typer.Option("--generic", help="Not classic mistakes: every small change of the code.")
    ] = False,
) -> None:
    """Put in every classic mistake and see the exercise's tests catch it."""
    from labs.kit.mutants import check_mutants

    if generic:
        raise typer.Exit(0 if say_strength(choose(which), sample) else 1)

    bad = total = 0
    for verdict in check_mutants(choose(which), sample=sample):
        total += verdict.mutant is not None
        bad += not verdict.is_good
        name = verdict.mutant.name if verdict.mutant else "(the engine)"
        sign = SIGNS["passed" if verdict.is_good else "failed"]
        console.print(f"{sign} {verdict.exercise} {name}: {escape(verdict.text)}")
    console.print(f"{total} mutants, {bad} to look at")
    raise typer.Exit(1 if bad else 0)


@app.command(rich_help_panel=MAINTAINERS)
def variants(
    which: Which = None,
    sample: Annotated[bool, typer.Option("--sample", help="Of each phase one, by a hash.")] = False,
) -> None:
    """Another right answer to every exercise, written from its last hint, must pass."""
    from labs.kit.variants import check_variants, one_a_phase

    bad = 0
    for verdict in check_variants(one_a_phase(choose(which)) if sample else choose(which)):
        bad += not verdict.is_good
        sign = SIGNS["passed" if verdict.is_good else "failed"]
        console.print(f"{sign} {verdict.exercise}: {escape(verdict.text)}")
    raise typer.Exit(1 if bad else 0)


def say_strength(chosen: list[Exercise], sample: bool) -> bool:
    """Measure, say what no test sees and each phase's score; whether that is enough."""
    from labs.kit.strength import by_phase, is_strong, measure

    strengths = []
    for strength in measure(chosen, at_most=1 if sample else None):
        strengths.append(strength)
        console.print(f"{strength.exercise.number}: {strength.killed} of {strength.tried} changes are seen")
        for mutation in strength.survived:
            console.print(
                f"  {mutation.function}\n    - {escape(mutation.old)}\n    + {escape(mutation.new)}"
            )
        for sentence in strength.wrong:
            console.print(f"  [red]{escape(sentence)}[/]")
    for phase, (killed, tried) in by_phase(strengths).items():
        console.print(f"{phase}: {killed} of {tried}, {killed / tried:.1%}" if tried else f"{phase}: none")
    return is_strong(strengths, sample)


@app.command(rich_help_panel=MAINTAINERS)
def sync(
    only_look: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit status 1 if out of date.")
    ] = False,
    release: Annotated[
        bool, typer.Option("--release", help="Remember these starters, so that `lab migrate` knows them.")
    ] = False,
) -> None:
    """Generate starters, their hashes and the code in solutions and chapters."""
    from labs.kit.migrate import record_release
    from labs.kit.sync import sync as sync_files

    stale, left_alone = sync_files(write=not only_look)
    for name in stale:
        console.print(f"{'out of date' if only_look else 'written'}: {name}")
    for sentence in left_alone:
        console.print(f"[yellow]{escape(sentence)}[/]")
    if not stale:
        console.print("everything generated is up to date")
    if release and not only_look:
        record_release()
    raise typer.Exit(1 if only_look and stale else 0)


def main() -> None:
    """The entry point: what people get wrong is said in one sentence, exit status 2."""
    try:
        app()
    except LabError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
