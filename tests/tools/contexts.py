"""A pytest plugin: coverage.py by branch, and of each line the tests that run it.

`pytest -p contexts`, this folder on the path; CONTEXTS is a folder for what is found, CONTEXTS_OF the folders and files
that are watched, with `:` between. Works with xdist: each process writes files of its own.

A line has the context `test::...`, or `fixture:...` where a fixture of more than one test runs it: all of its tests
depend on that.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

FOLDER = Path(os.environ["CONTEXTS"])
WATCHED = [str(Path(path).resolve()) for path in os.environ["CONTEXTS_OF"].split(":")]
WIDE = ("session", "package", "module", "class")

# Before tests/conftest.py imports the package, so that what runs at its import is known too.
COVERAGE = coverage.Coverage(
    data_file=str(FOLDER / f"coverage.{os.getpid()}"),
    branch=True,
    include=[path if path.endswith(".py") else f"{path}/*" for path in WATCHED],
    config_file=False,
    messages=False,
)
COVERAGE.start()
tests: dict[str, dict] = {}  # of each test its seconds, and the wide fixtures that it has


def fixture_name(definition: pytest.FixtureDef) -> str:
    return f"fixture:{definition.baseid}::{definition.argname}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    definitions = getattr(item, "_fixtureinfo", None)
    wide = [
        fixture_name(each[-1])
        for each in (definitions.name2fixturedefs.values() if definitions else ())
        if each[-1].scope in WIDE
    ]
    tests[item.nodeid] = {"seconds": 0.0, "fixtures": sorted(wide)}
    COVERAGE.switch_context(item.nodeid)
    result = yield
    COVERAGE.switch_context("")
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[object]:
    if fixturedef.scope not in WIDE:
        return (yield)
    COVERAGE.switch_context(fixture_name(fixturedef))
    try:
        return (yield)
    finally:
        COVERAGE.switch_context(request._pyfuncitem.nodeid if fixturedef.scope != "session" else "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of the controller of several processes, too, which knows no tests."""
    if report.nodeid in tests:
        tests[report.nodeid]["seconds"] += report.duration


def pytest_unconfigure() -> None:
    COVERAGE.stop()
    COVERAGE.save()
    (FOLDER / f"tests.{os.getpid()}.json").write_text(json.dumps(tests))
