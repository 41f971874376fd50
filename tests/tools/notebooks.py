"""Runs notebooks; as a command, keeps their outputs: `python -m tests.tools.notebooks phases/*/walkthrough.ipynb`."""

import atexit
import copy
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.worlds.waiting import PATIENCE

LIMIT = 5 * PATIENCE  # seconds a cell


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run, in its own folder and on a CPU. Raises what a cell raises."""
    client = client_for(path)
    client.execute()
    tidy(client.nb)
    return client.nb


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leave out what differs between two runs or two machines and says nothing."""
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"].pop("text/plain", None)  # its size in pixels


def client_for(path: Path) -> NotebookClient:
    notebook = nbformat.read(path, as_version=4)
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["MPLCONFIGDIR"] = fonts_of_its_own()
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm's, where a library imports it
    resources = {"metadata": {"path": str(path.parent)}}
    return NotebookClient(
        notebook,
        timeout=LIMIT,
        startup_timeout=LIMIT,
        kernel_name="python3",
        resources=resources,
        coalesce_streams=True,
    )


def execute_again(path: Path) -> tuple[nbformat.NotebookNode, list[str]]:
    """As `execute`, and what goes wrong then for a reader who runs cells again, in a sentence each.

    In one kernel: all cells; then each once more, from the last to the first, so that none finds the one before it
    run anew; then all from the top, each twice. Each must print what it printed at first.
    """
    client = client_for(path)
    cells = [(index, cell) for index, cell in enumerate(client.nb.cells) if cell.cell_type == "code"]
    wrong = []
    with client.setup_kernel():
        cells = [(index, cell, text_of(client.execute_cell(cell, index))) for index, cell in cells]
        twice = [cell for cell in cells for _ in range(2)]
        for when, order in (("alone after all", cells[::-1]), ("twice, from the top", twice)):
            for index, cell, before in order:
                where = f"cell {index}, run {when}: {cell.source.splitlines()[0]}"
                try:
                    now = text_of(client.execute_cell(copy.deepcopy(cell), index))
                except CellExecutionError as error:
                    wrong.append(f"{where}: {error.ename}: {error.evalue}")
                    continue
                if now != before and "timing" not in cell.metadata.get("tags", []):
                    wrong.append(f"{where}: prints something else:\n{now}\ninstead of\n{before}")
    tidy(client.nb)
    return client.nb, wrong


@functools.cache
def fonts_of_its_own() -> str:
    """A folder with matplotlib's list of fonts, made for this run.

    The user's may name fonts of an environment that is gone, and what matplotlib says of it would be in the outputs;
    so would the making of a list, if a notebook were first to need one.
    """
    folder = tempfile.mkdtemp(prefix="matplotlib-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make = [sys.executable, "-c", "import matplotlib.font_manager"]
    subprocess.run(make, env={**os.environ, "MPLCONFIGDIR": folder}, check=True, capture_output=True)
    return folder


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a cell printed and returned, in one piece."""
    parts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        # The text beside a picture names its size in pixels, which fonts decide.
        parts.append(output.get("text", "") if "image/png" not in data else "")
        parts.append(data.get("text/plain", "") if "image/png" not in data else "")
    return "\n".join(line.rstrip() for line in "".join(parts).splitlines())


def has_picture(cell: nbformat.NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        print(path)
        nbformat.write(execute(path), path)
