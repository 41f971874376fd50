"""The `lab` command, and what it can do. What takes long to import is imported after the first line is out."""

import re
import sys

import typer
from rich.console import Console
from rich.markup import escape

from labs.kit.commands import (
    answers,
    check,
    doctor,
    grade,
    hunts,
    league,
    maintain,
    opened,
    overview,
    read,
    run,
)
from labs.kit.regions import LabError
from minivllm.commands.quiet import quiet_libraries

INSTRUCTORS, MAINTAINERS = "For instructors", "For maintainers"  # groups of `lab --help`
TAKES_A_COMMAND = {"context_settings": {"ignore_unknown_options": True}}


class Lab(typer.core.TyperGroup):
    """`lab`, which says what there is to do with an exercise to whoever names one alone."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple:
        if re.fullmatch(r"\d+(\.\d+)?", args[0]):
            raise LabError(
                f"say what to do with {args[0]}: `lab check {args[0]}` or, say, `lab hint {args[0]}`"
            )
        return super().resolve_command(ctx, args)


quiet_libraries()
app = typer.Typer(
    cls=Lab, help="Your path through the course.", add_completion=False, pretty_exceptions_enable=False
)
app.callback(invoke_without_command=True)(overview.overview)
app.command()(check.check)
app.command()(check.watch)
app.command("debug")(check.debug_command)
app.command()(answers.hint)
app.command()(answers.api)
app.command(**TAKES_A_COMMAND)(hunts.hunt)
app.command("open")(opened.open_exercise)
app.command()(league.league)
app.command()(answers.diff)
app.command("reset")(answers.reset_command)
app.command()(answers.migrate)
app.command(**TAKES_A_COMMAND)(run.run)
app.command()(run.demo)
app.command("compare", **TAKES_A_COMMAND)(run.compare_command)
app.command("read")(read.read_command)
app.command()(read.notebook)
app.command()(doctor.doctor)
app.command("grade", rich_help_panel=INSTRUCTORS)(grade.grade_command)
app.command(rich_help_panel=MAINTAINERS)(maintain.mutants)
app.command(rich_help_panel=MAINTAINERS)(maintain.variants)
app.command(rich_help_panel=MAINTAINERS)(maintain.sync)


def main() -> None:
    """The entry point: what people get wrong is said in one sentence, exit status 2."""
    try:
        app()
    except LabError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
