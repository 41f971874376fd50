"""The `lab` command."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from minivllm.labs import LabError

app = typer.Typer(help="Your path through the course.", add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)


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
        console.print(f"{'out of date' if check else 'written'}: {name}", soft_wrap=True)
    for sentence in left_alone:
        console.print(f"[yellow]{escape(sentence)}[/]", soft_wrap=True)
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
