"""A copy of the checkout to try things on, with fresh starters and no pass remembered."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from labs.kit.regions import Exercise, edit, read_engine
from labs.kit.sync import sync
from minivllm.labs import ROOT, splice

PARTS = ("minivllm", "labs", "tests", "solutions", "phases", "pyproject.toml")


class Checkout:
    """root: of the copy. The tests that work on it read the engine's regions from it, too."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in PARTS:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, root / name)
        self.forget()

    def forget(self) -> None:
        """Fresh starters, no progress, only the real mutants and hints."""
        for path in self.root.glob("labs/0*/*.py"):
            path.unlink()
        shutil.rmtree(self.root / ".lab", ignore_errors=True)
        sync(self.root)

    def run(
        self, *command: str, labs: str | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess:
        """A Python command on the copy; `labs` is what MINIVLLM_LABS is set to."""
        environment = {k: v for k, v in os.environ.items() if k not in ("MINIVLLM_LABS", "COLUMNS")}
        environment |= {"PYTHONPATH": str(self.root)} | ({"MINIVLLM_LABS": labs} if labs is not None else {})
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            input=stdin,
        )

    def lab(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess:
        return self.run("-m", "labs.kit.cli", *arguments, stdin=stdin)

    def pytest(self, *arguments: str, labs: str | None = None) -> subprocess.CompletedProcess:
        return self.run("-m", "pytest", "-p", "no:cacheprovider", *arguments, labs=labs)

    def grade(self) -> dict[str, dict]:
        """Exercise -> what `lab grade` says of it."""
        result = self.lab("grade", "--json")
        return {entry["exercise"]: entry for entry in json.loads(result.stdout)["exercises"]}

    def file(self, number: str) -> Path:
        """The learner's file of an exercise."""
        return self.root / read_engine()[number].starter.relative_to(ROOT)

    def place(self, number: str, text: str) -> str:
        """`file:line` of the first line of an exercise's file that has this text."""
        lines = self.file(number).read_text().split("\n")
        line = next(n for n, line in enumerate(lines, 1) if text in line)
        return f"{self.file(number).relative_to(self.root)}:{line}"

    def solve(self, *numbers: str) -> None:
        """Put our code in the place of these exercises' stubs; of all, if none is named."""
        exercises = read_engine()
        for number, exercise in exercises.items():
            if number in numbers or not numbers:
                self._put(number, exercise.text, exercises)

    def answer(self, number: str, *edits: tuple[str, str]) -> None:
        """Put our code with a mistake in the place of an exercise's stub."""
        exercises = read_engine()
        self._put(number, edit(exercises[number], edits), exercises)

    def _put(self, number: str, text: str, exercises: dict[str, Exercise]) -> None:
        path = self.file(number)
        path.write_text(splice(path.read_text(), text, exercises.keys() - {number}, path.name)[0])
