"""Writes what is generated from the regions: starters, their hashes, the code in solutions, places in chapters."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from labs.kit.hunt import read_hunts
from labs.kit.regions import ROOT, Exercise, LabError, read_engine

# Open exercises and their phases: files are named open_NAME*.py, and a judge is labs.kit.judges.NAME.
OPEN = {
    "header": "01_request_and_weights",
    "packing": "02_lora_layers",
    "mixed_batch": "03_cpu_punica",
    "shrink": "04_triton_sgmv",
    "eviction": "05_slot_manager",
    "turns": "06_max_loras_scheduler",
    "waiting_line": "07_engine",
    "detokenizer": "09_serving",
    "keeping": "10_many_adapters",
    "placement": "10_many_adapters",
    "routing": "11_many_gpus",
    "sharing": "12_variants",
    "publishing": "13_adapters_that_learn",
}
OURS = ("naive", "good", "best")

# What `lab check` says of an untouched exercise, as chapters show it.
_PLACE = re.compile(r"^(· (\S+) .* TODO )labs/\S+:\d+$", re.MULTILINE)
_BLOCK = re.compile(r"(<!-- code: lab (\S+) -->\n)(.*?)(<!-- /code -->)", re.DOTALL)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sync(root: Path = ROOT, write: bool = True) -> tuple[list[str], list[str]]:
    """Bring everything generated up to date. Nothing is written when anything is wrong.

    write   False: only find out what would be written

    Returns (files that were out of date, sentences about files that were left alone). LabError for regions and
    documents that break a rule.
    """
    exercises = read_engine(root)
    files, left_alone = _starters(root, exercises)
    # A learner's test is told from a starter by nobody but its hunt, so what is there stays.
    files |= {h.test_file: h.starter for h in read_hunts(root).values() if not h.test_file.is_file()}
    files |= _open_starters(root)
    files |= dict(_documents(root, exercises)) | dict(_chapters(root, exercises))
    stale = {path: text for path, text in files.items() if _text(path) != text}
    for path, text in stale.items() if write else ():
        if text is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [str(path.relative_to(root)) for path in stale], left_alone


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _starters(root: Path, exercises: dict[str, Exercise]) -> tuple[dict[Path, str | None], list[str]]:
    """What every starter and the list of their hashes should hold (None: no such file), and what was spared."""
    index = root / "labs" / "starters.json"
    recorded = json.loads(_text(index) or "{}")
    files: dict[Path, str | None] = {}
    left_alone: list[str] = []
    entries: dict[str, dict[str, str]] = {}
    for exercise in exercises.values():
        name = str(exercise.starter.relative_to(ROOT / "labs"))
        if entries.setdefault(name, {"module": exercise.module})["module"] != exercise.module:
            raise LabError(f"labs/{name} would stand for {entries[name]['module']} and {exercise.module}")
        files[root / "labs" / name] = exercise.fresh
        entries[name]["sha256"] = sha256(files[root / "labs" / name])
    files |= {root / "labs" / name: None for name in recorded.keys() - entries.keys()}
    for path, wanted in list(files.items()):
        found, name = _text(path), str(path.relative_to(root / "labs"))
        if found not in (None, wanted) and sha256(found) != recorded.get(name, {}).get("sha256"):
            left_alone.append(f"labs/{name} is not as it was generated: somebody's work, left as it is")
            del files[path]
    files[index] = json.dumps(entries, indent=2) + "\n"
    return files, left_alone


def _open_starters(root: Path) -> dict[Path, str]:
    """Every open exercise's starter, which is our naive answer, unless somebody has worked on it; and their hashes."""
    index = root / "labs" / "open_starters.json"
    recorded, files = json.loads(_text(index) or "{}"), {}
    naive = {
        f"{phase}/open_{name}": _text(root / f"solutions/{phase}/open_{name}_naive.py")
        for name, phase in OPEN.items()
    }
    for stem, wanted in naive.items():
        path = root / "labs" / f"{stem}.py"
        found = _text(path)
        if wanted is not None and (found is None or sha256(found) == recorded.get(stem)):
            files[path] = wanted
    hashes = {stem: sha256(text) for stem, text in naive.items() if text is not None}
    return files | ({index: json.dumps(hashes, indent=2) + "\n"} if hashes else {})


def _documents(root: Path, exercises: dict[str, Exercise]) -> Iterator[tuple[Path, str]]:
    """Every solution, its `code` blocks filled from the regions. Chapters have none: an answer is one link away."""
    for path in sorted(root.glob("solutions/*/README.md")):
        where, text = path.relative_to(root), path.read_text(encoding="utf-8")

        def fill(match: re.Match, where: Path = where) -> str:
            if match[2] not in exercises:
                raise LabError(f"{where}: there is no lab {match[2]}")
            if "<!-- code:" in match[3]:
                raise LabError(f"{where}: the code of lab {match[2]} has no '<!-- /code -->'")
            return f"{match[1]}```python\n{exercises[match[2]].code()}```\n{match[4]}"

        filled, blocks = _BLOCK.subn(fill, text)
        if blocks != text.count("<!-- code:"):
            raise LabError(f"{where}: a block is not '<!-- code: lab N.M -->', code, '<!-- /code -->'")
        yield path, filled


def _chapters(root: Path, exercises: dict[str, Exercise]) -> Iterator[tuple[Path, str]]:
    """Both pages of every chapter, with the places where exercises begin in fresh starters."""

    def place(match: re.Match) -> str:
        if match[2] not in exercises:
            raise LabError(f"a chapter shows lab {match[2]}, and there is none")
        exercise = exercises[match[2]]
        lines = exercise.fresh.split("\n")
        line = next(n for n, line in enumerate(lines, 1) if f"# region lab {exercise.number}:" in line)
        return f"{match[1]}{exercise.starter.relative_to(ROOT)}:{line}"

    for path in sorted(root.glob("phases/*/*.md")):
        yield path, _PLACE.sub(place, path.read_text(encoding="utf-8"))
