"""What `lab open` says."""

from random import Random
from typing import Annotated, Any

import typer
from rich.markup import escape

from labs.kit.commands.shared import SIGNS, console
from labs.kit.open_exercises import ROUNDS, OpenExercise, fresh_seed, leaderboard, open_exercises, report
from labs.kit.progress import Progress, shown


def line_of(exercise: OpenExercise, progress: Progress) -> str:
    """One line of a list."""
    return f"  {SIGNS[exercise.state(progress.passed)]} {exercise.key}: {escape(exercise.title)}"


def say_count() -> None:
    """How many are within their budget, in a line."""
    progress, known = Progress(), open_exercises()
    met = sum(exercise.state(progress.passed) == "passed" for exercise in known)
    console.print(
        f"[bold]open exercises[/]  {met} of {len(known)} within their budget; `lab open` lists them"
    )


def list_open() -> None:
    """All of them, with what became of each."""
    progress = Progress()
    for exercise in open_exercises():
        console.print(line_of(exercise, progress))
    console.print("[dim]an interface and a budget, no recipe: `lab open 5` judges that of phase 5[/]")


def judge_open(which: str) -> bool:
    """Judge the learner's answer beside ours, on inputs made now; whether it met the budget."""
    [exercise] = open_exercises(which)
    judging, progress, digest = exercise.judge, Progress(), exercise.digest
    console.print(f"[bold]{exercise.key}: {escape(exercise.title)}[/]")
    console.print(f"yours: {shown(exercise.file)}, which says what is asked")
    with console.status("judging yours and ours on fresh inputs"):
        seed = fresh_seed()
        verdicts = leaderboard(exercise, seed)
    if verdicts["yours"].count is None:
        console.print(f"  [red]✗ yours is refused:[/] {escape(verdicts['yours'].why)}")
    for who, verdict in sorted(
        ((who, verdict) for who, verdict in verdicts.items() if verdict.count is not None),
        key=lambda entry: entry[1].count,
    ):
        name = "[bold]yours[/]" if who == "yours" else f"ours, {who}"
        sign = "[green]✓[/]" if exercise.meets(verdict) else "[red]✗[/]"
        console.print(f"  {sign} {verdict.count:10.4g}  {name}")
    console.print(f"    {judging.BUDGET:10.4g}  the budget: {judging.UNIT}")
    lines = judging.beside(Random(seed)) if hasattr(judging, "beside") else ()
    if lines:
        console.print(
            f"    [dim]a count above is the worst on {ROUNDS} inputs; on the first of them alone:[/]"
        )
    for line in lines:
        console.print(f"    [dim]{escape(line)}[/]")
    is_met = exercise.meets(verdicts["yours"])
    if is_met:
        with progress.changing():
            # First, since the path goes on after the last.
            progress.passed = {exercise.key: digest, **progress.passed}
    console.print(f"[dim]ours: {shown(exercise.ours('best').parent)}/open_{exercise.name}_*.py[/]")
    return is_met


def grades(which: str | None) -> list[dict[str, Any]]:
    """For instructors: of the phases that `which` names whole; none for an exercise, or a phase without one."""
    return report([exercise for exercise in open_exercises() if which in (None, exercise.number)])


def open_exercise(
    which: Annotated[
        str | None, typer.Argument(help="A phase, such as 5, or a name, such as placement; none: all.")
    ] = None,
) -> None:
    """Judge your answer to a phase's open exercise beside ours. Exit status 1 if it misses the budget."""
    if which is None:
        return list_open()
    raise typer.Exit(0 if judge_open(which) else 1)
