"""A copy of the checkout to try things on, with fresh starters and no pass remembered; what tests say of answers."""

import gc
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from labs.kit import forks, in_place, overlay
from labs.kit.forks import Job, Outcome
from labs.kit.regions import ROOT, Exercise, edit, read_engine, splice
from labs.kit.sync import sync
from labs.kit.variants import one_a_phase, with_variant
from tests.tools.forked import SERVER

PARTS = ("minivllm", "labs", "tests", "solutions", "phases", "docs", "pyproject.toml")


class Checkout:
    """root: of the copy. The tests that work on it read the engine's regions from it, too."""

    def __init__(self, root: Path, *more: str) -> None:
        """more: what tests of the whole engine need beside `PARTS`"""
        self.root = root
        for name in (*PARTS, *more):
            source = ROOT / name
            if source.is_dir():
                # Compiled modules, too, but for those in which pytest keeps the names of the files they were made from.
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("*-pytest-*.pyc"))
            elif source.exists():
                shutil.copy(source, root / name)
        self.generate()

    def generate(self) -> None:
        """Make starters anew, where what they are made of was changed."""
        for path in self._written():
            path.unlink()
        sync(self.root)
        self.fresh = {path: path.read_text() for path in self._written()}
        self.files = {n: self.root / e.starter.relative_to(ROOT) for n, e in read_engine().items()}

    def _written(self) -> list[Path]:
        """What `lab sync` writes for learners."""
        return [*self.root.glob("labs/[01]*/*.py"), *self.root.glob("labs/*starters.json")]

    def forget(self) -> None:
        """Fresh starters, no progress, only the real mutants and hints."""
        for path in {*self._written()} - self.fresh.keys():
            path.unlink()
        for path, text in self.fresh.items():
            if not path.is_file() or path.read_text() != text:
                path.write_text(text)
        shutil.rmtree(self.root / ".lab", ignore_errors=True)

    def run(self, *command: str, labs: str | None = None) -> subprocess.CompletedProcess:
        """A Python command on the copy; `labs` is what of it is the learner's code."""
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.root,
            env=environment(self.root, labs),
            capture_output=True,
            text=True,
        )

    def shell(self, command: str) -> subprocess.CompletedProcess:
        """A command line as somebody types it in the copy, with this Python's programs."""
        env = environment(self.root, None)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        return subprocess.run(command, shell=True, cwd=self.root, env=env, capture_output=True, text=True)

    def execute(self, code: str, labs: str | None = None) -> subprocess.CompletedProcess:
        """What `run` would give for `-c` and the code, but that torch is there already."""
        return self._serve(["-c", code], labs)

    def lab(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
        return self._serve(["labs.kit.cli", *arguments], stdin=stdin)

    def pytest(self, *arguments: str, labs: str | None = None) -> subprocess.CompletedProcess:
        return self._serve(["pytest", "-p", "no:cacheprovider", "-W", "ignore", *arguments], labs)

    def _serve(
        self, command: list[str], labs: str | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess:
        """What `run` would give for `-m` and the command, or for `-c` and code, but that torch is there already."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
            files[0].write_text(stdin)
            process = self.start(command, files, labs)
            process.join()
            _, stdout, stderr = (file.read_text() for file in files)
            return subprocess.CompletedProcess(command, process.exitcode, stdout, stderr)

    def start(
        self, command: list[str], files: list[Path], labs: str | None = None
    ) -> multiprocessing.process.BaseProcess:
        """The same, while it runs.   files: of its stdin, stdout and stderr"""
        process = SERVER.Process(target=run_module, args=(command, self.root, files, labs))
        process.start()
        return process

    def file(self, number: str) -> Path:
        """The learner's file of an exercise."""
        return self.files[number]

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

    def take_variants(self) -> None:
        """Put every exercise's variant in the place of its stub."""
        exercises = read_engine()
        for number, exercise in exercises.items():
            self._put(number, with_variant(exercise), exercises)

    def _put(self, number: str, text: str, exercises: dict[str, Exercise]) -> None:
        path = self.file(number)
        changed = path.with_suffix(".changed")
        changed.write_text(splice(path.read_text(), text, exercises.keys() - {number}, path.name)[0])
        changed.replace(path)  # at once: `lab watch` may look at any time


def environment(root: Path, labs: str | None) -> dict[str, str]:
    """This process's, without what it or `tests/conftest.py` has set for itself."""
    own = ("MINIVLLM_LABS", "MINIVLLM_PLUGINS", "TRITON_INTERPRET", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return kept | {"PYTHONPATH": str(root)} | (overlay.environment(labs) if labs is not None else {})


def run_module(command: list[str], root: Path, files: list[Path], labs: str | None) -> None:
    """Be `python -m COMMAND`, or `python -c CODE`, in the checkout `root`."""
    for descriptor, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    gc.freeze()  # what was loaded before stays: nobody need look through it for garbage
    os.chdir(root)
    sys.path.insert(0, str(root))
    for name in [n for n in sys.modules if n.partition(".")[0] in ("labs", "minivllm", "tests")]:
        del sys.modules[name]
    here = environment(root, labs)
    os.environ.clear()
    os.environ.update(here)
    sys.argv = command
    try:
        if command[0] == "-c":
            exec(command[1], {"__name__": "__main__"})
        else:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


def one_of_each(*phases: int) -> list[str]:
    """The number of an exercise of each of these phases: the same in every run, chosen by nobody."""
    return [e.number for e in one_a_phase(read_engine().values()) if int(e.phase[:2]) in phases]


def asked_for(request: pytest.FixtureRequest) -> set[str]:
    """What a module's tests are given as `name` in this run: a fixture need prepare no more."""
    items = [item for item in request.session.items if item.path == request.path]
    return {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}


def judged(
    jobs: Iterable[Job], settings: Mapping[str, float] | None = None, changes: bool = False, **options: Any
) -> Iterator[tuple[Job, Outcome]]:
    """What `forks.run` says of them in a process without the engine, once it has run all, in the order of their ends.

    settings   of `labs.kit.forks`, in the place of its own
    changes    `run_changes` says it, in the place of `forks.run`
    """
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=_judge, args=(sender, list(jobs), settings or {}, changes, options))
    process.start()
    sender.close()
    yield from receiver.recv()
    process.join()


def _judge(
    sender: Connection, jobs: list[Job], settings: Mapping[str, float], changes: bool, options: dict
) -> None:
    for name, value in settings.items():
        setattr(forks, name, value)
    sender.send(list((in_place.run_changes if changes else forks.run)(jobs, **options)))
