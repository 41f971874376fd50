"""A pytest plugin: what is unfinished is TODO, not FAILED, and what a learner got wrong is said in a few lines."""

import bdb
import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator

import pytest

from labs.kit import sentences
from labs.kit.missing_returns import returning_nothing
from labs.kit.overlay import Todo, active
from labs.kit.regions import ROOT

TITLE = re.compile(r"lab \d+\.\d+: [^\"'\n]+")
IS_SHORT = pytest.StashKey[bool]()
LONGEST = 16  # lines of a message that are shown
# What errors mean here that say nothing themselves.
MEANING: dict[type[BaseException], str] = {
    bdb.BdbQuit: "a debugger has no terminal here; `lab debug N.M` runs the exercise's tests in yours",
    MemoryError: "the tests may take 3 GiB of memory beside what they begin with, and this takes more",
}
_NOTHING = re.compile(r"\bNone(?:Type)?\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lab", metavar="N.M", help="only the tests that grade this exercise")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if number := config.getoption("--lab"):
        others = [item for item in items if number not in exercises_of(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if number in exercises_of(item)]


def pytest_configure(config: pytest.Config) -> None:
    """With a learner's code: say little of a failure, unless a kind of traceback is asked for."""
    config.stash[IS_SHORT] = (
        bool(active()) and config.option.tbstyle == "auto" and not config.option.fulltrace
    )
    if config.stash[IS_SHORT]:
        config.option.tbstyle = "native"  # it will not be shown, and is quick to make
    steady_hypothesis()


def steady_hypothesis() -> None:
    """The same examples in every run, however slow the machine: neither grades nor tests may change by chance."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "labs",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
    )
    settings.load_profile("labs")


def pytest_assertrepr_compare(
    config: pytest.Config, op: str, left: object, right: object
) -> list[str] | None:
    """How two things that a test compares differ. None: pytest says it."""
    return sentences.of_comparison(op, left, right) if config.stash.get(IS_SHORT, False) else None


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and everything it was raised from or because of."""
    seen: list[BaseException] = []
    ahead = [error]
    while ahead:
        here = ahead.pop(0)
        if here not in seen:
            seen.append(here)
            yield here
            ahead += [e for e in (here.__cause__, here.__context__, *getattr(here, "exceptions", ())) if e]


def todo_of(error: BaseException) -> str | None:
    """The `lab N.M: title` of the unsolved exercise that an error comes from, if it comes from one.

    A Triton kernel cannot raise `Todo`: the interpreter has an assertion that says it, a GPU an error while compiling.
    """
    for link in chain(error):
        if isinstance(link, Todo) or (isinstance(link, AssertionError) and TITLE.fullmatch(str(link))):
            return str(link)
        if type(link).__module__.startswith("triton") and (found := TITLE.search(str(link))):
            return found[0]
    return None


def message_of(error: BaseException) -> str:
    """What an error says, in so many lines at most; of errors that wrap others, what the first one says."""
    if type(error).__module__.startswith("triton") and error.__cause__:
        error = error.__cause__
    text = str(error)
    if isinstance(error, AssertionError | pytest.fail.Exception):
        text = sentences.of_assertion(text, error.__traceback__)
    else:
        text = f"{type(error).__name__}: {text or MEANING.get(type(error), '')}"
    lines = [
        *_of_missing_returns(text),
        *text.splitlines(),
        *(line for note in getattr(error, "__notes__", ()) for line in note.splitlines()),
    ]
    more = [f"... {len(lines) - LONGEST} more lines"] if len(lines) > LONGEST else []
    return "\n".join(lines[:LONGEST] + more)


def _of_missing_returns(text: str) -> list[str]:
    """Which of the learner's functions may have given the None that a message speaks of."""
    if not _NOTHING.search(text):
        return []
    names = [name for module, source in active().items() for name in returning_nothing(module, source.text)]
    return [
        f"`{name}` can end without a value, and then gives None: is a `return` missing?" for name in names
    ]


def learners_place(error: BaseException) -> str | None:
    """`file:line` of the innermost line of a learner's file that an error passed through."""
    files = {source.path for source in active().values()}
    for link in reversed(list(chain(error))):
        for frame, line in reversed(list(traceback.walk_tb(link.__traceback__))):
            if frame.f_code.co_filename in files:
                return f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{line}"
    return None


def exercises_of(item: pytest.Item) -> list[str]:
    """The exercises that a test grades, the one marked closest to it first."""
    return [mark.args[0] for mark in item.iter_markers("lab")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    error = call.excinfo and call.excinfo.value  # before pytest puts its own skip in the place of unittest's
    report = yield
    if report.skipped:
        report.message = reason_of(report)
        if error is None or not learners_place(error):
            return report
        # The test did not leave off by itself: the learner's code has raised that.
        report.outcome, report.message = (
            "failed",
            f"your code skips the test ({type(error).__name__}: {error})",
        )
    elif report.failed and error:
        report.todo, report.message = todo_of(error), message_of(error)
    else:
        return report
    report.message = report.message.replace("N.M", next(iter(exercises_of(item)), "N.M"))
    report.place, report.asked = learners_place(error), place_in_test(item, error)
    if item.config.stash[IS_SHORT] and exercises_of(item):
        place = f"your code: {report.place}\n" if report.place else ""
        report.longrepr = f"lab {exercises_of(item)[0]}: {report.message}\n{place}asked in {report.asked}"
    return report


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why something was skipped, or failed as it was expected to."""
    if hasattr(report, "wasxfail"):
        return report.wasxfail
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def place_in_test(item: pytest.Item, error: BaseException) -> str:
    """`file:line` where the test was when it failed."""
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == str(item.path)
    ]
    return f"{os.path.relpath(item.path, ROOT)}:{lines[-1] if lines else item.location[1] + 1}"


def pytest_report_teststatus(report: pytest.TestReport) -> tuple | None:
    # The report stays a failure, so that the exit status is 1.
    return ("todo", "T", ("TODO", {"yellow": True})) if getattr(report, "todo", None) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    todo = Counter(report.todo for report in terminalreporter.getreports("todo"))
    for exercise, tests in sorted(todo.items()):
        terminalreporter.write_line(f"TODO {exercise} ({tests} test{'s' * (tests > 1)})", yellow=True)
