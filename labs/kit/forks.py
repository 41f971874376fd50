"""Runs exercises' tests in forks of this process, where torch is loaded already: each starts in no time."""

import gc
import importlib
import json
import multiprocessing
import os
import re
import resource
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from labs.kit.plugin import exercises_of, steady_hypothesis
from labs.kit.tampering import judges, replaced
from minivllm.labs import ROOT, Overlay, Source
from minivllm.quiet import quiet_libraries

NO_END = "no end after"  # so many seconds
NO_TEST = "no test carries its mark"
TROUBLE = {3: "pytest itself failed", 4: "pytest would not start", 5: NO_TEST}  # by pytest's exit status
LIMIT = 60.0  # seconds that an exercise's tests may compute
LONGEST_MESSAGE = 1 << 22  # bytes of a result
FOREIGN = "something else than the tests wrote to the grader"
PATIENCE = 10.0  # how many times as long they may take in all
GRACE = 5.0  # seconds after that; who is still there is killed
IDLE = 0.05  # whoever computes for less than this share of so many seconds waits for what never comes
LOOK = 1.0  # seconds between looks at who is still there
WANTED_BY_ALL = ("safetensors.torch", "hypothesis")
# What takes long to import, and which files of tests do so.
WANTED_BY_SOME = {
    # By no exercise, but by tests of incidents.
    ("transformers", "peft"): re.compile(r"tiny_(?!models)|(import|from) (peft|transformers)"),
    # By the first call of `torch.testing.assert_close`.
    ("torch.distributed.tensor",): re.compile("assert_close"),
}


class Result(NamedTuple):
    """Of one test.

    outcome   passed, failed, todo or skipped
    place     file:line of the learner's where it failed
    asked     file:line of the test's
    """

    test: str
    outcome: str
    message: str = ""
    place: str | None = None
    asked: str = ""


@dataclass(frozen=True)
class Job:
    """The tests of an exercise, on the engine with some modules from elsewhere.

    key     what the caller knows the job by
    trace   messages are whole tracebacks
    only    the names of the tests to run; None = all
    files   files of tests, in the place of those that have the exercise's mark
    names   of the test functions in these files that count, or `FILE.py::*`; none: all
    memory  bytes that it may allocate, of code that nobody trusts: it is confined. None = it is trusted
    """

    key: Any
    exercise: str
    sources: dict[str, Source]
    stop_at_first: bool = False
    trace: bool = False
    only: frozenset[str] | None = None
    files: tuple[Path, ...] = ()
    names: frozenset[str] = frozenset()
    memory: int | None = None

    def all_files(self) -> list[Path]:
        """In which its tests are."""
        found = list(self.files) or test_files(self.exercise)
        if self.only is None:
            return found
        wanted = {test.partition("::")[0] for test in self.only}
        return [path for path in found if path.relative_to(ROOT).as_posix() in wanted]

    def wants(self, item: pytest.Item) -> bool:
        """Whether a test is one of the job's."""
        if not self.files:
            return self.exercise in exercises_of(item) and (self.only is None or item.nodeid in self.only)
        known = {getattr(item, "originalname", item.name), f"{item.path.name}::*"}
        return not self.names or not known.isdisjoint(self.names)


@dataclass
class Outcome:
    """trouble: why the tests did not run to their end, if they did not"""

    results: list[Result] = field(default_factory=list)
    trouble: str | None = None
    seconds: float = 0.0

    def of(self, *outcomes: str) -> list[Result]:
        return [result for result in self.results if result.outcome in outcomes]

    @property
    def passed(self) -> bool:
        """Whether every test that can run here passed, and there is one."""
        return not self.trouble and bool(self.of("passed")) and not self.of("failed", "todo")


def test_files(exercise: str) -> list[Path]:
    """Files with tests of the exercise."""
    folder = ROOT / "tests" / f"phase_{int(exercise.partition('.')[0]):02}"
    mark = f'mark.lab("{exercise}")'
    return [path for path in sorted(folder.glob("test_*.py")) if mark in path.read_text(encoding="utf-8")]


def run(
    jobs: Iterable[Job],
    on_test: Callable[[Job, Result], None] | None = None,
    limit: float = LIMIT,
    at_a_time: int | None = None,
    patience: float = PATIENCE,
) -> Iterator[tuple[Job, Outcome]]:
    """Every job in a fork of its own; yielded as they end.

    limit       seconds that a job's tests may compute    patience   how many times as long they may take in all
    at_a_time   None = as many as there are cores
    """
    at_a_time = at_a_time or os.cpu_count() or 1
    _import(WANTED_BY_ALL)
    waiting = [(job, job.all_files()) for job in jobs]
    running: dict[Connection, _Child] = {}
    _import_what_several_want([files for _, files in waiting])
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                job, files = waiting.pop(0)
                child = _Child(job, files, limit, patience)
                running[child.receiver] = child
            ready = wait(running, LOOK)
            for receiver, child in list(running.items()):
                result = child.receive() if receiver in ready else child.miss()
                if result and on_test:
                    on_test(child.job, result)
                if child.has_ended:
                    del running[receiver]
                    yield child.job, child.outcome
    finally:
        for child in running.values():
            child.process.kill()


def _import_what_several_want(files_of_jobs: list[list[Path]]) -> None:
    """It pays to import that once, in this process."""
    texts = {path: path.read_text(encoding="utf-8") for files in files_of_jobs for path in files}
    for names, sign in WANTED_BY_SOME.items():
        wanted = [files for files in files_of_jobs if any(sign.search(texts[path]) for path in files)]
        if len(wanted) > 1:
            _import(names)


def _import(names: tuple[str, ...]) -> None:
    """Import here what forks would import. Some of it imports Triton, whose interpreter is chosen before."""
    # Whoever starts to use a GPU cannot be forked; this way nobody has to in order to see that there is one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    quiet_libraries()
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in names:
        importlib.import_module(name)
    gc.freeze()  # what is here stays: forks need not look through it for garbage


class _Child:
    """A fork that runs one job's tests and sends the result of each.

    What it sends is JSON with a token that only its recorder has: whoever else writes into the pipe is not believed.
    """

    def __init__(self, job: Job, files: list[Path], limit: float, patience: float) -> None:
        context = multiprocessing.get_context("fork")
        self.job = job
        self.limit = limit
        self.outcome = Outcome()
        self.started = time.monotonic()
        self.begun = ""
        self.has_ended = False
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if job.memory else None
        self.receiver, sender = context.Pipe(duplex=False)
        self.token = secrets.token_hex(16)
        home = Path(self.folder.name) if self.folder else None
        self.process = context.Process(
            target=_run_tests, args=(job, files, (limit, patience), (sender, self.token), home), daemon=True
        )
        self.process.start()
        sender.close()  # so that the pipe ends where the child does
        # Signals end it sooner, unless its code has seen to that they do not.
        self.last_resort = threading.Timer(patience * limit + GRACE, self.process.kill)
        self.last_resort.daemon = True
        self.last_resort.start()

    def receive(self) -> Result | None:
        """One message, if it is a test's result. Nobody waits here for the next."""
        try:
            kind, said = self._read()
        except (EOFError, OSError):
            return self._vanish()
        if kind == "begun":
            self.begun = str(said)
        elif kind == "result":
            self.outcome.results.append(Result(*said))
            return self.outcome.results[-1]
        else:
            if kind != "end":
                self.process.kill()
            self._end(TROUBLE.get(said) if kind == "end" else str(said))
        return None

    def miss(self) -> None:
        """Nothing came. A process that it has started may hold the pipe open after its own end."""
        if not self.process.is_alive() and not self.receiver.poll():
            self._vanish()

    def _vanish(self) -> None:
        self.process.join()
        is_late = self.process.exitcode == -signal.SIGXCPU
        is_late |= self.process.exitcode == -signal.SIGKILL and time.monotonic() - self.started > self.limit
        why = f"{NO_END} {self.limit:.0f} s" if is_late else "the tests' process ended before they did"
        if self.process.exitcode == -signal.SIGSEGV:  # Triton's interpreter uses whatever address it is given
            why += ", by an address outside its memory"
        self._end(f"{why}, in {self.begun}" if self.begun else why)

    def _read(self) -> tuple[str, Any]:
        """What the recorder has sent: begun, result, end or tampering, and what there is to say of it."""
        try:
            token, kind, said = json.loads(self.receiver.recv_bytes(LONGEST_MESSAGE))
            if token == self.token:
                return kind, said
        except (ValueError, TypeError):
            pass  # no JSON, or not what a recorder sends
        return "tampering", FOREIGN

    def _end(self, trouble: str | None) -> None:
        self.process.join()
        self.last_resort.cancel()
        if self.folder:
            self.folder.cleanup()
        self.outcome.trouble, self.outcome.seconds = trouble, time.monotonic() - self.started
        self.has_ended = True


def _run_tests(
    job: Job, files: list[Path], limits: tuple[float, float], pipe: tuple[Connection, str], home: Path | None
) -> None:
    """What a child does.   home: the only folder in which code that nobody trusts may write"""
    recorder = _Recorder(job, *pipe)
    _set_limits(*limits, recorder)
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silence, descriptor)
    os.chdir(ROOT)
    if home is not None:
        _confine(home, job.memory)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Overlay)]
    Overlay(job.sources).install()
    steady_hypothesis()
    # Of marks only the exercise's count here, not those that the settings leave out.
    options = [
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "-p",
        "labs.kit.plugin",
        *["-x"] * job.stop_at_first,
        *["--tb=long"] * job.trace,
    ]
    recorder.send("end", int(pytest.main([*map(str, files), *options], plugins=[recorder])) if files else 5)
    os._exit(0)  # threads that tests have left must not hold it up


def _confine(home: Path, memory: int) -> None:
    from labs.kit.confine import confine

    os.environ.update({"HOME": str(home), "TMPDIR": str(home), "TRITON_CACHE_DIR": str(home / "triton")})
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    confine(home, memory)


def _set_limits(limit: float, patience: float, recorder: "_Recorder") -> None:
    """A test that has computed too long, or waits for what never comes, fails where it is. If that does not help,
    a signal ends the process, or whoever has started it."""
    computed, started = time.process_time(), time.monotonic()

    def fail(what: str) -> None:
        recorder.session.shouldstop = "no end"
        pytest.fail(f"{NO_END} {limit:.0f} s of {what}")

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal computed
        before, computed = computed, time.process_time()
        if computed - before < IDLE * limit or time.monotonic() - started > patience * limit:
            fail("waiting")

    signal.signal(signal.SIGPROF, lambda number, frame: fail("computing"))
    signal.setitimer(signal.ITIMER_PROF, limit, 1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 5, int(limit) + 10))
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, limit, limit)


class _Recorder:
    """A pytest plugin: of all tests only the job's, and what becomes of each through the pipe: name, then result."""

    def __init__(self, job: Job, sender: Connection, token: str) -> None:
        self.job = job
        self.session: pytest.Session | None = None
        self.judges = judges() if job.memory else {}

        def send(kind: str, said: object) -> None:
            sender.send_bytes(json.dumps([token, kind, said]).encode())

        self.send = send

    def pytest_runtest_logfinish(self) -> None:
        """What a test itself has put elsewhere is back by now."""
        if self.judges and (others := replaced(self.judges)):
            self.send("tampering", f"{others[0]} was put out of its place")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.job.wants(item)]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send("begun", nodeid.partition("::")[2])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome = "todo" if getattr(report, "todo", None) else report.outcome
            message = report.longreprtext if self.job.trace else getattr(report, "message", "")
            place, asked = getattr(report, "place", None), getattr(report, "asked", "")
            self.send("result", Result(report.nodeid, outcome, message, place, asked))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = "\n".join(
                line[4:] for line in str(report.longrepr).splitlines() if line.startswith("E   ")
            )
            self.send("result", Result(report.nodeid, "todo" if ".Todo: lab " in text else "failed", text))
