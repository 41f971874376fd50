"""`lab doctor`."""

import typer
from rich.markup import escape

from labs.kit.commands.shared import SIGNS, console


def doctor() -> None:
    """Whether everything is there that the course needs."""
    from labs.kit.doctor import examine

    is_well = True
    for finding in examine():
        is_well &= finding.is_good is not False
        sign = {True: SIGNS["passed"], False: SIGNS["failed"], None: "[yellow]-[/]"}[finding.is_good]
        console.print(f"{sign} {finding.name}: {escape(finding.text)}")
    raise typer.Exit(0 if is_well else 1)
