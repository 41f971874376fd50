"""`lab read 5`: "Reading vLLM" on the second page of a chapter, and vLLM's file where the learner has its wheel."""

import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from labs.kit.regions import ROOT, LabError

VERSION = "v0.22.1"
ONLINE = f"https://github.com/vllm-project/vllm/blob/{VERSION}"
HEADING = "\n## Reading vLLM\n"
_FILE = re.compile(r"`(vllm/[\w/]+\.py)`")
_NAME = re.compile(r"`(?:\w+\.)*([A-Za-z_]\w+)(?:\(\))?`")
_PARAGRAPH = re.compile(r"\n\n+|\n(?=\d+\. |- )")
_ANSWER = re.compile(r"\n *<details>.*?</details>\n", re.DOTALL)


class Reading(NamedTuple):
    """text: the section, its answers left out; files: vLLM's, in its order, each with the names said beside it"""

    text: str
    files: dict[str, list[str]]


def reading_of(phase: str) -> Reading:
    """Of a phase, such as 05_slot_manager. LabError where its chapter has no such section."""
    path = ROOT / "phases" / phase / "in_vllm.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    _, heading, rest = text.partition(HEADING)
    if not heading:
        raise LabError(f"phases/{phase} has no section on reading vLLM")
    section = re.split(r"^#{2,3} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    text = re.sub(r"\n{3,}", "\n\n", _ANSWER.sub("\n", section)).strip()
    files: dict[str, list[str]] = {}
    for paragraph in _PARAGRAPH.split(section):
        for file in _FILE.findall(paragraph):
            names = files.setdefault(file, [])
            names += [name for name in dict.fromkeys(_NAME.findall(paragraph)) if name not in names]
    return Reading(text, files)


def vllm_folder(at: Path | None) -> Path | None:
    """The folder `vllm` of an installed wheel, found without importing it; or that at a path. None: not here.

    at   a checkout, an unpacked wheel, or its folder `vllm`. LabError where there is none.
    """
    if at is None:
        spec = importlib.util.find_spec("vllm")
        places = spec.submodule_search_locations if spec else None
        return Path(next(iter(places))) if places else None
    found = next((path for path in (at / "vllm", at) if (path / "lora").is_dir()), None)
    if found is None:
        raise LabError(f"{at} holds no vLLM: name a checkout of it, or an unpacked wheel")
    return found


def version_of(folder: Path) -> str | None:
    """What the wheel says of itself, beside its folder; None for a checkout."""
    names = [path.name for path in folder.parent.glob("vllm-*.dist-info")]
    return names[0].removeprefix("vllm-").removesuffix(".dist-info") if names else None


def place_of(name: str, folder: Path) -> Path:
    """`vllm/lora/utils.py` in that folder. LabError where this version has no such file."""
    path = folder / name.removeprefix("vllm/")
    if not path.is_file():
        raise LabError(f"{folder} has no {name}: chapters are about {VERSION}")
    return path


def names_in(file: str, names: list[str], folder: Path | None) -> list[str]:
    """Lines that say where names are: by line where vLLM is at hand, else by module."""
    if folder is None:
        return [f"{file.removesuffix('.py').replace('/', '.')}: {', '.join(names)}"] if names else []
    lines = {name: line_of(name, place_of(file, folder)) for name in names}
    return [f"{line}: {name}" for name, line in lines.items() if line]


def line_of(name: str, path: Path) -> int | None:
    """Where a class or function of that name begins."""
    begins = re.compile(rf"\s*(async )?(def|class) {name}\b")
    lines = path.read_text("utf-8", "replace").split("\n")
    return next((number for number, line in enumerate(lines, 1) if begins.match(line)), None)


def open_in_editor(path: Path) -> bool:
    """With the learner's editor ($VISUAL, $EDITOR), until it is closed. False where none is set."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        return False
    try:
        subprocess.run([*shlex.split(editor), str(path)])
    except OSError as error:
        raise LabError(f"'{editor}' cannot be run: {error.strerror}") from None
    return True
