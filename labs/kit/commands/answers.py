"""`lab hint`, `lab api`, `lab diff`, `lab reset` and `lab migrate`: about what you have written, or will."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from labs.kit.api import contract, page_of
from labs.kit.commands import hunts
from labs.kit.commands.shared import Number, choose, choose_one, console, only_hunt
from labs.kit.folding import beside, differing, signed
from labs.kit.hints import hints_of
from labs.kit.hunt import choose_hunts, is_hunt, read_hunts
from labs.kit.overlay import starters
from labs.kit.path import mark, next_of
from labs.kit.progress import Progress, learners_code, reset, shown
from labs.kit.regions import LabError
from labs.kit.surroundings import put_back


def hint(
    number: Annotated[str | None, typer.Argument(help="An exercise; none: where you are.")] = None,
) -> None:
    """The next of three hints: a nudge, the approach, pseudocode."""
    if number is None:
        number, why = where_one_is(Progress())
        console.print(f"[dim]lab {number}, {why}[/]")
    if is_hunt(number):
        hunts.hint(only_hunt(number))
        return
    exercise = choose_one(number)
    hints = hints_of(exercise)
    if not hints:
        raise LabError(f"there are no hints for lab {number} yet")
    given = Progress().next_hint(number, len(hints.hints))
    console.print(f"[bold]Hint {given} of {len(hints.hints)}, lab {number}: {escape(exercise.title)}[/]")
    console.print(hints.hints[given - 1].strip("\n"), markup=False)


def where_one_is(progress: Progress) -> tuple[str, str]:
    """The exercise or hunt whose hint somebody wants who names none, and why that one. LabError after the last."""
    exercises = choose(None)
    states = {exercise.number: progress.state(exercise) for exercise in exercises}
    states |= {number: hunt.state(progress) for number, hunt in read_hunts().items()}
    if states.get(progress.checked, "passed") != "passed":
        return progress.checked, "which you checked last"
    following = next_of(exercises, states, progress.last)
    if following is None:
        raise LabError(
            f"nothing on your path is left to solve; name an exercise, such as `lab hint {exercises[0].number}`"
        )
    begun = states[following.number] == "started"
    return following.number, "which you have begun" if begun else "which is next on your path"


def api(number: Annotated[str, typer.Argument(help="An exercise, such as 3.2; a phase: its pages.")]) -> None:
    """What an exercise may use of the engine: signatures, what they are for, and no bodies."""
    if "." not in number:
        for exercise in choose(number):
            console.print(f"lab api {exercise.number}  {escape(exercise.title)}[dim]{mark(exercise)}[/]")
        return
    exercise = choose_one(number)
    uses, entries = page_of(exercise)
    console.print(f"[bold]lab {number}: {escape(exercise.title)}[/]")
    if promised := contract(exercise):
        console.print(promised, markup=False)
    for function, sentence in uses.items():
        console.print(f"{function}: {sentence}", markup=False)
    where = ""
    for entry in entries:
        if entry.where != where:
            where = entry.where
            console.print(f"\n[bold]{escape(where)}[/]")
        console.print(entry.text, markup=False)
    if not (promised or uses or entries):
        console.print("It needs nothing of the engine: Python and PyTorch are enough.")


def diff(
    number: Number, spoil: Annotated[bool, typer.Option("--spoil", help="Also before you pass.")] = False
) -> None:
    """Your code beside ours: a sign before each line that differs, docstrings folded."""
    if is_hunt(number):
        raise LabError(f"`lab hunt {only_hunt(number).id} --spoil` shows what was broken")
    exercise = choose_one(number)
    if not spoil and Progress().state(exercise) != "passed":
        raise LabError(
            f"lab {number} has not passed as it is now; `lab check {number}`, or --spoil to see ours"
        )
    codes = beside(learners_code(exercise), exercise.code())
    yours, ours = (with_marks(code, marked) for code, marked in zip(codes, differing(*codes)))
    if codes[0] == codes[1]:
        console.print("yours is ours, but for docstrings, comments and layout")
    elif console.width >= 160:
        table = Table("yours", "ours")
        table.add_row(yours, ours)
        Console().print(table)
    else:
        Console().print("[bold]yours[/]", yours, "[bold]ours[/]", ours)
    console.print(f"[dim]why it is so: solutions/{exercise.phase}/README.md[/]")


def with_marks(code: str, marked: set[int]) -> Syntax:
    """Code in colours. A marked line has a sign before it, and another colour where the terminal has any."""
    syntax = Syntax(signed(code, marked), "python", theme="ansi_dark", word_wrap=True)
    for line in marked:
        syntax.stylize_range("bold yellow", (line, 0), (line + 1, 0))
    return syntax


def reset_command(
    number: Annotated[str, typer.Argument(help="An exercise, such as 3.2; or a phase: all of its files.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    outside: Annotated[
        bool, typer.Option("--outside", help="What stands outside the exercises; your answers stay.")
    ] = False,
) -> None:
    """Put the stub back. What was there is kept under .lab/backup."""
    if is_hunt(number):
        chosen = choose_hunts(number)
        if not yes and not typer.confirm(f"Put back {'all hunts' if number == '8' else f'hunt {number}'}?"):
            raise typer.Exit(1)
        for path in hunts.reset(chosen):
            console.print(f"kept: {shown(path)}")
        return
    chosen = choose(number)
    is_phase = "." not in number
    what = f"all of labs/{chosen[0].phase}" if is_phase else f"lab {number} in {shown(chosen[0].starter)}"
    if outside:
        what = (
            f"what is outside the exercises of {', '.join(dict.fromkeys(shown(e.starter) for e in chosen))},"
        )
    if not yes and not typer.confirm(f"Put back {what} as it was at the start?"):
        raise typer.Exit(1)
    if outside:
        for exercise in {exercise.starter: exercise for exercise in chosen}.values():
            kept = put_back(exercise)
            console.print(f"kept: {kept}" if kept else f"{shown(exercise.starter)} is as it was there")
        return
    for path in reset(chosen, whole_files=is_phase):
        console.print(f"kept: {shown(path)}")


def migrate() -> None:
    """After an update: carry your answers to where their exercises are now. Your old files are kept."""
    from labs.kit.migrate import migrate as carry

    starters()  # says so where there is no checkout
    for sentence in carry() or ["every exercise is where it belongs"]:
        console.print(escape(sentence))
