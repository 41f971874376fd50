"""What every test relies on."""

import functools
import gc
import logging
import os
import signal
import ssl
import sys

import pytest
import torch

import labs.kit.startup  # noqa: F401 -- before minivllm
from tests.tools.device import taking_turns
from tests.tools.interpreted import keep_the_language_replaced

pytest_plugins = ["labs.kit.plugin"]

# PEFT imports torchao, which warns of kernels for hardware that is not there and that no test calls.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

# A shell has what it runs in the background ignore Ctrl-C, and nohup a terminal's end. Tests send both.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Two cores: one thread a test leaves room for what else runs, and tiny models gain nothing from more.
torch.set_num_threads(1)

# Without a GPU the Triton kernels run through its interpreter, which must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# httpx reads the certificates of all authorities for each call without a client, and no test speaks https.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# jsonschema, which nbformat imports, would build 38 grammars of internet names for it, two seconds in each process:
# no notebook's schema asks for any.
sys.modules["rfc3987_syntax"] = None

# Python's own 700 have the garbage collector look so often that a tenth of the tests' time goes there.
gc.set_threshold(50_000, 10, 10)

# Files that take longest, so that they do not come last, when the other processes have nothing left to do.
LONGEST = (
    *("test_runner_graphs.py", "test_engine_demo_tokens.py", "test_lab.py", "test_hunts.py"),
    *("test_notebooks.py", "test_structured_outputs.py", "test_core_alone.py", "test_take_away.py"),
)

LEFT_OUT = pytest.StashKey[int]()  # how many nightly tests are not run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whole files change places, those whose tests wait for others to the end; what is in them keeps its order."""
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("nightly_without_gpu"):
            item.add_marker("nightly")
    waiting = {item.path for item in items if item.get_closest_marker("alone_on_gpu")}
    items.sort(key=lambda item: (item.path in waiting, item.path.name not in LONGEST))


def pytest_collection_finish():
    keep_the_language_replaced()
    pass_over_what_is_here()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After each file: engines have gone with its fixtures, and some tests unfreeze what was frozen."""
    yield
    if nextitem is None or nextitem.path != item.path:
        pass_over_what_is_here()


def pass_over_what_is_here():
    """Libraries and tests stay: whoever looks for garbage, or for what is left, passes over them from here on."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fixtures too: they are what takes memory."""
    keep_the_language_replaced()  # by now the file's first test may have loaded Triton
    if not torch.cuda.is_available():
        return (yield)
    with taking_turns(alone=item.get_closest_marker("alone_on_gpu") is not None):
        return (yield)


def pytest_deselected(items):
    """By `-m` or by `-k`: either way they do not run."""
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    for item in nightly[:1]:
        item.config.stash[LEFT_OUT] = item.config.stash.get(LEFT_OUT, 0) + len(nightly)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Every process of a run collects all tests, so one tells for all."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter, config):
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{left_out} nightly test{'s' * (left_out > 1)} not run: "
            "`make nightly` runs all of them, `-m nightly` those of the files named",
            yellow=True,
        )


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """The usual one: a tiny model's folder, those of its four adapters, and what PEFT answers with each."""
    from tests.worlds.engines import tiny_world  # many tests need neither transformers nor PEFT

    return tiny_world(tmp_path_factory)


@pytest.fixture(autouse=True)
def the_process_keeps_its_threads():
    """Else what a later test measures depends on which tests ran before it."""
    before = torch.get_num_threads()
    yield
    left, _ = torch.get_num_threads(), torch.set_num_threads(before)
    assert left == before
