"""What commands share: the screen, arguments, and how exercises and hunts are chosen."""

import re
from typing import Annotated

import typer
from rich.console import Console

from labs.kit.hunt import Hunt, choose_hunts
from labs.kit.overlay import starters
from labs.kit.regions import PHASES, Exercise, LabError, read_engine, sort_key

console = Console(highlight=False, soft_wrap=True)
WIPE = "\x1b[2K"  # what a terminal takes for: empty this line
SIGNS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "todo": "[yellow]·[/]", "started": "[yellow]~[/]"}

Which = Annotated[
    str | None, typer.Argument(help="A phase, such as 3, or an exercise, such as 3.2; none: all.")
]
Several = Annotated[
    list[str] | None, typer.Argument(help="Phases, such as 3, and exercises, such as 3.2; none: all.")
]
Number = Annotated[str, typer.Argument(help="An exercise, such as 3.2.")]


def choose(which: str | None) -> list[Exercise]:
    """The exercises of a phase, one exercise, or all. LabError for what is neither."""
    starters()  # says so where there is no checkout
    exercises = read_engine()
    found = [e for number, e in exercises.items() if which in (None, number, number.partition(".")[0])]
    if not found:
        near = [n for n in exercises if n.partition(".")[0] == which.partition(".")[0]] or list(exercises)
        if is_gone(which, near):
            raise LabError(
                f"there is no lab {which} any more, and no other exercise gets its number; phase "
                f"{which.partition('.')[0]} has {', '.join(near)}"
            )
        raise LabError(
            f"there is no lab '{which}': give a phase, {int(PHASES[0][:2])} to {int(PHASES[-1][:2])}, or an exercise, "
            f"{near[0]} to {near[-1]}"
        )
    return found


def is_gone(which: str, near: list[str]) -> bool:
    """Whether a number lies between those of exercises that there are.   near: their numbers, in order"""
    return bool(re.fullmatch(r"\d+\.\d+", which)) and sort_key(near[0]) < sort_key(which) < sort_key(near[-1])


def choose_one(number: str) -> Exercise:
    [first, *others] = choose(number)
    if others or first.number != number:
        raise LabError(f"{number} is a phase; name one exercise, such as {first.number}")
    return first


def only_hunt(number: str) -> Hunt:
    """LabError for the number of their phase."""
    [first, *others] = choose_hunts(number)
    if others:
        raise LabError(f"{number} is a phase; name one hunt, such as {first.number}")
    return first
