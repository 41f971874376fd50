"""Checks that every exercise has, without a test that is written for it.

While an exercise's tests run the calls of its functions are watched (`watching`), by three checks:

`shared_memory`   a call leaves its arguments as they were, and its result and its object do not hold them; a helper
                  that the learner has added may do as it likes with what its caller gives it
`faults`          each call that a body makes raises once: the error comes out, and nothing is left behind
`memory`          a second call, with other arguments, gives what it would give as the first of a process

What a check finds is a failure of a test of its own, which comes after the exercise's. `table.toml` has what bodies may
do all the same. Kernels of Triton (4.2, 4.3) are not watched, since Python does not run their bodies.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labs.kit.forks import GENERIC
from labs.kit.generic.faults import Faults
from labs.kit.generic.memory import Memory
from labs.kit.generic.shared_memory import SharedMemory
from labs.kit.generic.table import Table
from labs.kit.generic.watching import Call, Watch
from labs.kit.overlay import Source
from labs.kit.regions import Exercise

Check = SharedMemory | Faults | Memory


class GenericChecks:
    """A pytest plugin: the checks of one exercise, whose module comes from `source`, or is the engine's.

    can_fork   whether this process may start others; without that there is only `shared_memory`
    """

    def __init__(self, exercise: Exercise, source: Source | None, can_fork: bool) -> None:
        table = Table(exercise.number)
        self.watch = Watch(exercise, source)
        self.checks: list[Check] = [SharedMemory(self.watch, table)]
        if can_fork:
            self.checks = [Memory(self.watch), *self.checks, Faults(self.watch, table)]
        self.watch.observers = list(self.checks)

    def install(self) -> None:
        sys.meta_path.insert(0, self.watch)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        if items and self.watch.has_functions:
            items += [CheckItem.made(session, self, check) for check in self.checks]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not isinstance(item, CheckItem):
            self.watch.begin_test(item.nodeid, str(item.path))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self.watch.end_test()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if isinstance(call.excinfo and call.excinfo.value, Found):
            report.place, report.asked = call.excinfo.value.place, call.excinfo.value.asked
        return report


class Found(AssertionError):
    """What a check has found, with file:line of the function and of the test that called it."""

    def __init__(self, call: Call, sentence: str) -> None:
        super().__init__(sentence)
        self.place, self.asked = call.watched.place, call.asked


class CheckItem(pytest.Item):
    def __init__(self, *, checks: GenericChecks, check: Check, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.checks, self.check = checks, check
        self.add_marker(pytest.mark.lab(checks.watch.exercise.number))

    @classmethod
    def made(cls, session: pytest.Session, checks: GenericChecks, check: Check) -> "CheckItem":
        names = {"name": check.title, "nodeid": f"{GENERIC}::{check.title}"}
        return cls.from_parent(session, **names, checks=checks, check=check)

    def runtest(self) -> None:
        if self.checks.watch.unsolved:
            raise self.checks.watch.unsolved
        for call, sentence in self.check.found:
            raise Found(call, sentence)

    def reportinfo(self) -> tuple[Path, int, str]:
        return Path(__file__), 0, self.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo, *args: Any) -> str:
        return str(excinfo.value)
