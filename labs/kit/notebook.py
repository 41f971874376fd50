"""`lab notebook`: a copy of a phase's notebook in JupyterLab, on the learner's code or on ours."""

import importlib.util
import json
import os
import sys
from pathlib import Path

from labs.kit.progress import keep
from labs.kit.regions import ROOT, LabError

# Git does not see it, and `make clean` leaves it: what learners try out changes no committed notebook.
FOLDER = ROOT / "notebooks"


def learners_copy(phase: str, fresh: bool = False) -> tuple[Path, bool]:
    """The learner's copy of a phase's notebook, and whether it was made now from the committed one.

    It has no outputs: its reader guesses, and runs. LabError for a phase without one: phase 00 is a file to read.

    phase   such as 03_cpu_punica
    fresh   make it anew; what was there is kept under .lab/backup
    """
    ours, yours = ROOT / "phases" / phase / "walkthrough.ipynb", FOLDER / f"{phase}.ipynb"
    if not ours.is_file():
        raise LabError(f"phases/{phase} has no notebook; read its README.md")
    if yours.is_file() and not fresh:
        return yours, False
    if yours.is_file():
        keep(yours, phase)
    FOLDER.mkdir(exist_ok=True)
    text = ours.read_text(encoding="utf-8")
    text = text.replace("](../../", "](../")  # the copy lies one folder higher
    for page in ("README.md", "in_vllm.md"):
        text = text.replace(f"]({page}", f"](../phases/{phase}/{page}")
    yours.write_text(without_outputs(text), encoding="utf-8")
    return yours, True


def without_outputs(text: str) -> str:
    """A notebook as before its first run: a guess is worth something only while the answer is not on the page."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def require_jupyterlab() -> None:
    if importlib.util.find_spec("jupyterlab") is None:
        raise LabError("JupyterLab is not installed; `make setup` installs it")


def command(notebook: Path, options: list[str], browser: bool) -> list[str]:
    """What starts JupyterLab with the notebook open.

    The checkout is its root, so labs/ can be edited beside the notebook. Kernels run with this Python.

    options   JupyterLab's own; they have the last word
    browser   False, or no display: the address is printed alone
    """
    address = f"/lab/tree/{notebook.relative_to(ROOT).as_posix()}"
    settings = [f"--ServerApp.root_dir={ROOT}", f"--LabApp.default_url={address}"]
    quiet = [] if browser and has_display() else ["--no-browser"]
    # Jupyter refuses to run as root, which is who runs in most containers, unless it is told so.
    root = ["--allow-root"] if os.geteuid() == 0 else []
    return [sys.executable, "-m", "jupyterlab", *settings, *quiet, *root, *options]


def has_display() -> bool:
    """Without one, Jupyter would take a browser for terminals, which cannot show JupyterLab."""
    known = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return not sys.platform.startswith("linux") or any(os.environ.get(name) for name in known)
