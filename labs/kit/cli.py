"""The `lab` command."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from labs.kit.regions import Exercise, read_engine
from minivllm.labs import LabError

app = typer.Typer(help="Your path through the course.", add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)

Which = Annotated[
    str | None, typer.Argument(help="A phase, such as 3, or an exercise, such as 3.2; none: all.")
]


def choose(which: str | None) -> list[Exercise]:
    """The exercises of a phase, one exercise, or all. LabError for what is neither."""
    exercises = read_engine()
    found = [e for n, e in exercises.items() if which in (None, n, n.partition(".")[0])]
    if not found:
        raise LabError(f"there is no lab {which}; give a phase, 1 to 7, or one of {', '.join(exercises)}")
    return found


@app.callback(invoke_without_command=True)
def path(context: typer.Context) -> None:
    """Where you are in the course."""
    if context.invoked_subcommand is None:
        for exercise in choose(None):
            console.print(f"{exercise.number}  {escape(exercise.title)}")


@app.command()
def mutants(which: Which = None) -> None:
    """For maintainers: put in every classic mistake and see the exercise's tests catch it."""
    from labs.kit.mutants import check_mutants

    bad = total = 0
    for verdict in check_mutants(choose(which)):
        total += verdict.mutant is not None
        bad += not verdict.is_good
        name = verdict.mutant.name if verdict.mutant else "(the engine)"
        sign = "[green]✓[/]" if verdict.is_good else "[red]✗[/]"
        console.print(f"{sign} {verdict.exercise} {name}: {escape(verdict.text)}")
    console.print(f"{total} mutants, {bad} to look at")
    raise typer.Exit(1 if bad else 0)


@app.command()
def sync(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit status 1 if out of date.")
    ] = False,
) -> None:
    """For maintainers: generate starters, their hashes and the code in solutions and chapters."""
    from labs.kit.sync import sync as sync_files

    stale, left_alone = sync_files(write=not check)
    for name in stale:
        console.print(f"{'out of date' if check else 'written'}: {name}")
    for sentence in left_alone:
        console.print(f"[yellow]{escape(sentence)}[/]")
    if not stale:
        console.print("everything generated is up to date")
    raise typer.Exit(1 if check and stale else 0)


def main() -> None:
    """The entry point: what people get wrong is said in one sentence, exit status 2."""
    try:
        app()
    except LabError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
