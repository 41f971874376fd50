"""Runs exercises' tests in forks of this process, where torch is loaded already: each starts in no time."""

import gc
import importlib
import json
import math
import multiprocessing
import os
import re
import resource
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from labs.kit import plugin
from labs.kit.limits import (
    ASK,
    GRACE,
    LONG,
    LONG_BY_THE_CLOCK,
    LOOK,
    MOST,
    MOST_PROCESSES,
    NO_END,
    PATIENCE,
    Ends,
    Watch,
    kill_session,
    limit_memory,
    limit_of,
    refuse_forks,
    room_to_report,
)
from labs.kit.overlay import Overlay, Source
from labs.kit.plugin import exercises_of, learners_place, reason_of, steady_hypothesis
from labs.kit.regions import ROOT, read_engine
from labs.kit.tampering import judges, replaced
from minivllm.commands.quiet import quiet_libraries

GENERIC = "labs/kit/generic"  # where the tests are that every exercise has
NO_TEST = "no test carries its mark"
TROUBLE = {3: "pytest itself failed", 4: "pytest would not start", 5: NO_TEST}  # by pytest's exit status
SKIPPED = "it was skipped, which it is not on our code"
LONGEST_MESSAGE = 1 << 22  # bytes of a result
MOST_PRINTED = 4000  # characters of what a test's code has printed
FOREIGN = "something else than the tests wrote to the grader"
WANTED_BY_ALL = ("safetensors.torch", "hypothesis", "labs.kit.generic")
# What takes long to import, and which files of tests do so.
WANTED_BY_SOME = {
    # By tests of incidents, and by the whole idea in one file.
    ("transformers", "peft"): re.compile(r"tiny_(?!models)|(import|from) (peft|transformers)|00_one_file"),
    # By the first call of `torch.testing.assert_close`.
    ("torch.distributed.tensor",): re.compile("assert_close"),
}


class Result(NamedTuple):
    """Of one test.

    outcome   passed, failed, todo or skipped
    place     file:line of the learner's where it failed
    asked     file:line of the test's
    printed   what was printed while it ran, no more than `MOST_PRINTED`: our code prints nothing
    """

    test: str
    outcome: str
    message: str = ""
    place: str | None = None
    asked: str = ""
    printed: str = ""


@dataclass(frozen=True)
class Job:
    """The tests of an exercise, on the engine with some modules from elsewhere.

    key     what the caller knows the job by
    trace   messages are whole tracebacks
    only    the names of the tests to run; None = all
    files   files of tests, in the place of those that have the exercise's mark
    names   of the test functions in these files that count, or `FILE.py::*`; none: all
    memory  bytes that it may allocate, of code that nobody trusts: it is confined. None = it is trusted
    in_place  what puts the sources' code into the engine's functions, where this process has imported the engine
              (`labs.kit.in_place`): calls are not watched then, so the checks that every exercise has do not run
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
    in_place: tuple[Callable[[], None], ...] | None = None

    def all_files(self) -> list[Path]:
        """In which its tests are."""
        if self.files:
            return list(self.files)
        found = test_files(self.exercise)
        if self.only is None or self.is_about_all_calls:
            return found
        wanted = {test.partition("::")[0] for test in self.only}
        return [path for path in found if path.relative_to(ROOT).as_posix() in wanted]

    @property
    def is_about_all_calls(self) -> bool:
        """Whether one of the tests to run is one that looks at what the others call, so that all must run."""
        return self.only is not None and any(test.startswith(f"{GENERIC}::") for test in self.only)

    def wants(self, item: pytest.Item) -> bool:
        """Whether a test is one of the job's."""
        if self.only is not None and item.nodeid not in self.only and not self.is_about_all_calls:
            return False
        if not self.files:
            return self.exercise in exercises_of(item)
        known = {getattr(item, "originalname", item.name), f"{item.path.name}::*"}
        return not self.names or not known.isdisjoint(self.names)

    def on_our_code(self, only: frozenset[str] | None) -> "Job":
        """The same tests, or only some of them, on the engine as it is."""
        in_place = None if self.in_place is None else ()
        return replace(self, sources={}, only=only, stop_at_first=False, trace=False, in_place=in_place)


@dataclass
class Outcome:
    """trouble: why the tests did not run to their end, if they did not"""

    results: list[Result] = field(default_factory=list)
    trouble: str | None = None
    seconds: float = 0.0

    def of(self, *outcomes: str) -> list[Result]:
        return [result for result in self.results if result.outcome in outcomes]

    def fail_skips(self, but: frozenset[str]) -> None:
        """Tests that were skipped have failed, those of `but` left out."""
        self.results = [
            result._replace(outcome="failed", message=f"{SKIPPED}: {result.message}")
            if result.outcome == "skipped" and result.test not in but
            else result
            for result in self.results
        ]

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
    limit: float | None = None,
    at_a_time: int | None = None,
    patience: float = PATIENCE,
    on_wait: Callable[[Job, str, float, float], None] | None = None,
) -> Iterator[tuple[Job, Outcome]]:
    """Every job in a fork of its own; yielded as they end.

    limit       seconds that a job's tests may compute; None = by what they take on our code (`labs.kit.limits`)
    patience    how many times as long they may take in all
    at_a_time   None = as many as there are cores
    on_wait     called once with each test that takes long, for how many seconds it has run by the clock, and for how
                many of these it has computed

    A test that is skipped here and not on our code has failed.
    """
    at_a_time = at_a_time or os.cpu_count() or 1
    import_for_forks(WANTED_BY_ALL)
    waiting = [(job, job.all_files()) for job in jobs]
    running: dict[Connection, _Child] = {}
    ours = _OurCode(running)
    _import_what_several_want([files for _, files in waiting])
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                _Child(*waiting.pop(0)).join(running)
            ready = wait(running, LOOK)
            for receiver, child in list(running.items()):
                result = child.receive() if receiver in ready else child.miss()
                is_asked_for = child not in ours
                if result and on_test and is_asked_for:
                    on_test(child.job, result)
                if child.has_ended:
                    del running[receiver]
                    if done := ours.settle(child):
                        yield done.job, done.outcome
                else:
                    child.look_after(limit or ours.limit_of(child), patience)
                    if on_wait and is_asked_for and (seconds := child.runs_long()):
                        on_wait(child.job, child.begun, *seconds)
    finally:
        for child in running.values():
            kill_session(child.process)


class _OurCode:
    """Runs jobs' tests on our own code, beside them, where it matters what they do there.

    measured   for the children that do so because the job is late: the tests that are run
    compared   for the children that do so because tests were skipped: the child that skipped them
    """

    def __init__(self, running: dict[Connection, "_Child"]) -> None:
        self.running = running
        self.limits: dict[tuple, float] = {}
        self.measured: dict[_Child, tuple] = {}
        self.compared: dict[_Child, _Child] = {}

    def __contains__(self, child: "_Child") -> bool:
        return child in self.measured or child in self.compared

    def limit_of(self, child: "_Child") -> float:
        """Seconds that the child's tests may compute, as far as that is known."""
        job = child.job
        tests = (job.exercise, job.files, job.names, job.only, job.memory)
        if tests not in self.limits and job.sources and child.watch.is_late(ASK, PATIENCE):
            self.limits[tests] = math.inf  # until it is known
            self.measured[self._start(job.on_our_code(job.only))] = tests
        return self.limits.get(tests, MOST)

    def settle(self, child: "_Child") -> "_Child | None":
        """Take note of one that has ended. Returns whose outcome is known by that."""
        if child in self.measured:
            # Ours may have been edited so that it does not end either.
            self.limits[self.measured.pop(child)] = MOST if child.late else limit_of(child.watch.use.seconds)
            return None
        outcome = child.outcome
        skipped = frozenset(result.test for result in outcome.of("skipped"))
        if child in self.compared:
            other = self.compared.pop(child)
            other.outcome.fail_skips(but=skipped)
            return other
        if skipped and child.job.sources and not outcome.trouble and not outcome.of("failed", "todo"):
            self.compared[self._start(child.job.on_our_code(skipped))] = child
            return None
        return child

    def _start(self, job: Job) -> "_Child":
        return _Child(job, job.all_files()).join(self.running)


def _import_what_several_want(files_of_jobs: list[list[Path]]) -> None:
    """It pays to import that once, in this process."""
    texts = {path: path.read_text(encoding="utf-8") for files in files_of_jobs for path in files}
    for names, sign in WANTED_BY_SOME.items():
        wanted = [files for files in files_of_jobs if any(sign.search(texts[path]) for path in files)]
        if len(wanted) > 1:
            import_for_forks(names)


def import_for_forks(names: tuple[str, ...]) -> None:
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

    begun      the test that runs, since when, and what CPU time had been used by then
    expected   tests that have no result yet
    late       since when it has been told to end, and the sentence that says why
    """

    def __init__(self, job: Job, files: list[Path]) -> None:
        context = multiprocessing.get_context("fork")
        self.job, self.files = job, files
        self.outcome = Outcome()
        self.begun, self.begun_at, self.used_before, self.is_long = "", 0.0, 0.0, False
        self.expected: list[str] = []
        self.late: tuple[float, str] | None = None
        self.has_ended = False
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if job.memory else None
        self.receiver, sender = context.Pipe(duplex=False)
        self.token = secrets.token_hex(16)
        self.ends = Ends()
        home = Path(self.folder.name) if self.folder else None
        self.process = context.Process(
            target=_run_tests, args=(job, files, self.ends, (sender, self.token), home), daemon=True
        )
        self.process.start()
        sender.close()  # so that the pipe ends where the child does
        self.watch = Watch(self.process.pid)

    def join(self, running: "dict[Connection, _Child]") -> "_Child":
        running[self.receiver] = self
        return self

    def receive(self) -> Result | None:
        """One message, if it is a test's result. Nobody waits here for the next."""
        try:
            kind, said = self._read()
        except (EOFError, OSError):
            return self._vanish()
        if kind == "expected":
            self.expected = said
        elif kind == "begun":
            self.begun, self.begun_at, self.is_long = str(said), time.monotonic(), False
            self.used_before = self.watch.use.seconds
        elif kind == "result":
            return self._note(Result(*said))
        elif kind == "end":
            status, seconds = said
            self.watch.use = self.watch.use._replace(seconds=seconds)
            self._end(TROUBLE.get(status) or self._left_out())
        else:
            self._end(str(said))
        return None

    def miss(self) -> Result | None:
        """Nothing came. A process that it has started may hold the pipe open after its own end."""
        is_gone = not self.process.is_alive() and not self.receiver.poll()
        return self._vanish() if is_gone else None

    def look_after(self, limit: float, patience: float) -> None:
        """Bring it to its end if its tests have computed for `limit` seconds, or do not end for another reason."""
        if not self.watch.look():
            return
        if self.watch.use.processes > MOST_PROCESSES:
            self._kill(f"it started more than {MOST_PROCESSES} processes")
        elif self.late:
            since, why = self.late
            if time.monotonic() - since > GRACE:
                self._kill(why)
            else:
                self.ends.tell(self.process.pid)  # what has caught the first signal is told again
        elif what := self.watch.is_late(limit, patience):
            why = f"{NO_END} {limit:.0f} s of {what}"
            self.late = time.monotonic(), why
            self.ends.tell(self.process.pid, why)

    def runs_long(self) -> tuple[float, float] | None:
        """Seconds for which the current test has run and has computed, said once where they are many."""
        seconds = time.monotonic() - self.begun_at
        computed = min(self.watch.use.seconds - self.used_before, seconds)
        if not self.begun or self.is_long or (computed < LONG and seconds < LONG_BY_THE_CLOCK):
            return None
        self.is_long = True
        return seconds, computed

    def _note(self, result: Result) -> Result:
        self.outcome.results.append(result)
        if result.test in self.expected:
            self.expected.remove(result.test)
        return result

    def _kill(self, why: str) -> None:
        """Its end is seen when its pipe ends."""
        self.ends.ask_where(self.process.pid)
        self.late = self.late or (time.monotonic(), why)
        kill_session(self.process)

    def _vanish(self) -> Result | None:
        """It has ended without a word."""
        self.process.join()
        why = self.late[1] if self.late else "the tests' process ended before they did"
        if self.process.exitcode == -signal.SIGSEGV:  # Triton's interpreter uses whatever address it is given
            why += ", by an address outside its memory"
        test, places = self.begun.partition("::"), self.ends.places()
        files = {source.path for source in self.job.sources.values()}
        yours = next((place(*at) for at in places if at[0] in files), None)
        asked = next((place(*at) for at in places if at[0] in map(str, self.files)), "")
        if self.begun and self.late:
            self._end(None)
            is_told = any(result.test == self.begun for result in self.outcome.of("failed", "todo"))
            return None if is_told else self._note(Result(self.begun, "failed", why, yours, asked))
        self._end(why + f", in {test[2]}" * bool(self.begun) + f", at {yours}" * bool(yours))
        return None

    def _left_out(self) -> str | None:
        """A sentence about tests that were to run and did not, unless it was after a failure."""
        if not self.expected or self.outcome.of("failed", "todo"):
            return None
        return f"the tests ended before {self.expected[0].partition('::')[2]} was done"

    def _read(self) -> tuple[str, Any]:
        """What the recorder has sent: expected, begun, result, end or tampering, and what there is to say of it."""
        try:
            token, kind, said = json.loads(self.receiver.recv_bytes(LONGEST_MESSAGE))
            if token == self.token:
                return kind, said
        except (ValueError, TypeError):
            pass  # no JSON, or not what a recorder sends
        return "tampering", FOREIGN

    def _end(self, trouble: str | None) -> None:
        kill_session(self.process)
        self.process.join()
        if self.folder:
            self.folder.cleanup()
        self.ends.close()
        self.outcome.trouble, self.outcome.seconds = trouble, time.monotonic() - self.watch.started
        self.has_ended = True


def place(path: str, line: int) -> str:
    """As messages have it."""
    return f"{os.path.relpath(path, ROOT)}:{line}"


def _run_tests(
    job: Job, files: list[Path], ends: Ends, pipe: tuple[Connection, str], home: Path | None
) -> None:
    """What a child does.   home: the only folder in which code that nobody trusts may write"""
    recorder = _Recorder(job, *pipe)
    learners = {source.path for source in job.sources.values()}
    ends.prepare(learners | {str(path) for path in files}, recorder.fail)
    refuse_forks(learners, pytest.fail)
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silence, descriptor)
    os.chdir(ROOT)
    if home is None:
        limit_memory()
    else:
        _confine(home, job.memory)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["MINIVLLM_LABS"] = ""  # the job says whose code it is
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Overlay)]
    if job.in_place is None:
        Overlay(job.sources).install()
    for put in job.in_place or ():
        put()
    steady_hypothesis()
    # Of marks only the exercise's count here, not those that the settings leave out.
    options = [
        *("-m", ""),
        *("-p", "no:cacheprovider"),
        *("-p", "no:faulthandler"),
        *["-x"] * job.stop_at_first,
        *["--tb=long"] * job.trace,
    ]
    is_plain = bool(job.files) or job.in_place is not None
    # Named by `-p` it would be looked for among the plugins of all that is installed.
    plugins = [plugin, recorder] if is_plain else [plugin, _generic_checks(job), recorder]
    status = int(pytest.main([*map(str, files), *options], plugins=plugins)) if files else 5
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    recorder.send("end", [status, sum(use.ru_utime + use.ru_stime for use in used)])
    os._exit(0)  # threads that tests have left must not hold it up


def _generic_checks(job: Job) -> object:
    """A plugin with the tests that every exercise has. Code that nobody trusts starts no process, so it has fewer."""
    from labs.kit.generic import GenericChecks

    exercise = read_engine()[job.exercise]
    checks = GenericChecks(exercise, job.sources.get(exercise.module), can_fork=job.memory is None)
    checks.install()
    return checks


def _confine(home: Path, memory: int) -> None:
    from labs.kit.confine import confine

    os.environ.update({"HOME": str(home), "TMPDIR": str(home), "TRITON_CACHE_DIR": str(home / "triton")})
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    confine(home, memory)


class _Recorder:
    """A pytest plugin: of all tests only the job's, and what becomes of each through the pipe: name, then result."""

    def __init__(self, job: Job, sender: Connection, token: str) -> None:
        self.job = job
        self.session: pytest.Session | None = None
        self.judges = judges() if job.memory else {}

        own = os.getpid()

        def send(kind: str, said: object) -> None:
            if os.getpid() != own:  # a copy of this process, which goes on with the tests
                os._exit(1)
            sender.send_bytes(json.dumps([token, kind, said]).encode())

        self.send = send

    def fail(self, why: str) -> None:
        """End the test that runs, and all tests."""
        self.session.shouldstop = "no end"
        pytest.fail(why)

    def pytest_runtest_logfinish(self) -> None:
        """What a test itself has put elsewhere is back by now."""
        if self.judges and (others := replaced(self.judges)):
            self.send("tampering", f"{others[0]} was put out of its place")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.job.wants(item)]
        self.send("expected", [item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send("begun", nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """What ends pytest itself ends no more than the test, where the learner's code has raised it."""
        try:
            return (yield)
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            if learners_place(error):
                pytest.fail(f"{type(error).__name__}: {error}")
            raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Iterator[pytest.TestReport]:
        with room_to_report():
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome = "todo" if getattr(report, "todo", None) else report.outcome
            message = report.longreprtext if self.job.trace else getattr(report, "message", "")
            place, asked = getattr(report, "place", None), getattr(report, "asked", "")
            printed = (report.capstdout + report.capstderr)[:MOST_PRINTED]
            self.send("result", Result(report.nodeid, outcome, message, place, asked, printed))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = "\n".join(
                line[4:] for line in str(report.longrepr).splitlines() if line.startswith("E   ")
            )
            self.send("result", Result(report.nodeid, "todo" if ".Todo: lab " in text else "failed", text))
        elif report.skipped:
            self.send("result", Result(report.nodeid, "skipped", reason_of(report)))
