"""Runs notebooks; as a command, keeps their outputs: `python tests/helpers/notebooks.py phases/*/walkthrough.ipynb`."""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

LIMIT = 180  # seconds a cell


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run, in its own folder and on a CPU. Raises what a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["MPLCONFIGDIR"] = fonts_of_its_own()
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
    return notebook


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
