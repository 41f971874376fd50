"""`lab read` and `lab notebook`: what there is beside the exercises of a phase."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from labs.kit.commands.run import begun, environment, not_passed
from labs.kit.commands.shared import choose, console
from labs.kit.hunt import PHASE as HUNTS
from labs.kit.hunt import is_hunt
from labs.kit.path import next_of
from labs.kit.progress import Progress, shown
from labs.kit.regions import LabError


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
    if left := not_passed(yours):
        console.print(
            f"[yellow]Of yours {', '.join(left)} did not pass as it is now, so cells may show wrong results; "
            f"`lab check {' '.join(left)}` says why.[/]"
        )
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
