"""A learner's code that gets out of its tests, or never out of them, has failed, and the message says where."""

import os
import select
import subprocess
import sys

import pytest
from checkout import judged

from labs.kit import limits
from labs.kit.forks import Job
from labs.kit.limits import Use, Watch, limit_of
from labs.kit.overlay import Source
from labs.kit.regions import ROOT, read_engine

# What stands first in the body of 3.4, and what is said of it.
LEAVES = {
    "import pytest; pytest.skip('easy')": "your code skips the test (Skipped: easy)",
    "import unittest; raise unittest.SkipTest('easy')": "your code skips the test (SkipTest: easy)",
    "import pytest; pytest.xfail('easy')": "your code skips the test (XFailed: easy)",
    "import pytest; pytest.exit('easy', 0)": "Exit: easy",
    "raise KeyboardInterrupt": "KeyboardInterrupt: ",
    "import os; os.fork()": "it starts a process, which no exercise asks for",
}
STAYS = {
    "while True: pass": "computing",
    "import itertools; sum(itertools.repeat(0))": "computing",  # no line of Python ends there
    "import time; time.sleep(1000)": "waiting",
}
STUBBORN = "while True:\n    try:\n        while True: pass  # here\n    except: pass"
# Each starts one and waits, so that they grow for ever and the machine has no more than one of them to run.
CHAIN = "import ctypes, time\nwhile not ctypes.CDLL(None).fork(): pass\ntime.sleep(1000)"
FIRST = "    runs: list[tuple[int, slice]] = []\n"


CALLS = "from minivllm.lora.mapping import compute_runs\n\ndef test_it(): assert compute_runs([]) == []\n"


def answers(folder, bodies):
    """(files with our module, in each of which one of these bodies stands before that of 3.4; the body's first line)"""
    text = read_engine()["3.4"].text
    assert text.count(FIRST) == 1
    paths = []
    for n, body in enumerate(bodies):
        paths.append(folder / f"mapping{n}.py")
        lines = "".join(f"    {line}\n" for line in body.split("\n"))
        paths[-1].write_text(text.replace(FIRST, lines + FIRST))
    return paths, 1 + text[: text.index(FIRST)].count("\n")


def run(paths, *tests, **options):
    """(results, trouble, passed) of every answer, in their order.   tests: of their files; none: one that calls 3.4"""
    folder = paths[0].parent
    for n, text in enumerate(tests or [CALLS]):
        (folder / f"test_{n}.py").write_text(text)
    jobs = []
    for path in paths:
        sources = {"minivllm.lora.mapping": Source(str(path), path.read_text())}
        jobs.append(Job(path, "3.4", sources, files=tuple(sorted(folder.glob("test_*.py")))))
    said = {
        job.key: (
            [(r.test.partition("::")[2], r.outcome, r.message, r.place) for r in outcome.results],
            outcome.trouble,
            outcome.passed,
        )
        for job, outcome in judged(jobs, **options)
    }
    return [said[path] for path in paths]


def test_what_leaves_a_test_has_failed_it_where_it_left(tmp_path):
    paths, line = answers(tmp_path, LEAVES)

    for path, said, (results, trouble, passed) in zip(paths, LEAVES.values(), run(paths), strict=True):
        place = f"{os.path.relpath(path, ROOT)}:{line}"
        assert (results, trouble, passed) == ([("test_it", "failed", said, place)], None, False)


@pytest.mark.parametrize(
    "bodies",
    [{STUBBORN: "computing"}, pytest.param(STAYS, marks=pytest.mark.nightly)],
    ids=["python that holds on", "python, C and sleep"],
)
def test_what_does_not_end_fails_where_it_is_however_it_holds_on(tmp_path, bodies):
    paths, line = answers(tmp_path, bodies)

    for path, body, (results, trouble, passed) in zip(paths, bodies, run(paths, limit=2), strict=True):
        said = f"no end after 2 s of {bodies[body]}"
        place = f"{os.path.relpath(path, ROOT)}:{line + 2 * (body == STUBBORN)}"
        assert (results, trouble, passed) == ([("test_it", "failed", said, place)], None, False)


HELD = """
import signal
import pytest
from minivllm.lora.mapping import compute_runs

@pytest.fixture
def held():
    yield
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True: pass

def test_it(held): assert compute_runs([]) == []
"""


def test_what_holds_on_after_its_test_fails_it_unless_it_has_failed(tmp_path):
    paths, _ = answers(tmp_path, ["pass", "raise ValueError('mine')"])

    passes, fails = run(paths, HELD, limit=0.5, settings={"GRACE": 0.2})

    assert [result[1] for result in passes[0]] == ["passed", "failed"] and not passes[2]
    assert [result[1:3] for result in fails[0]] == [("failed", "ValueError: mine")] and not fails[2]


def test_processes_that_start_processes_are_all_ended(tmp_path):
    paths, _ = answers(tmp_path, [CHAIN])

    [(results, trouble, passed)] = run(paths)

    assert (trouble, passed) == (None, False)
    assert results[0][1:3] == ("failed", "it started more than 64 processes")


SKIPS = """
import pytest
from minivllm.lora import mapping

def test_first(): pass

@pytest.mark.skipif(hasattr(mapping, 'EASY'), reason='it is easy')
def test_marked(): pass

@pytest.mark.skipif(True, reason='no GPU')
def test_usual(): pass

@pytest.mark.xfail(hasattr(mapping, 'EASY'), reason='hard')
def test_expected(): assert not hasattr(mapping, 'EASY')
"""
ENDS = """
import pytest
from minivllm.lora import mapping

@pytest.fixture(autouse=True)
def session(request):
    mapping.session = request.session

def test_first(): mapping.leave()

def test_second(): assert False
"""


def test_a_test_that_is_skipped_has_failed_unless_our_code_skips_it(tmp_path):
    """The learner's code puts a mark on it, or changes what it asks; ours is run on the same tests to tell."""
    [easy, honest], _ = answers(tmp_path, ["pass", "pass"])
    easy.write_text(easy.read_text() + "\nEASY = True\n")

    [skipped, _, skipped_passed], [usual, _, usual_passed] = run([easy, honest], SKIPS)

    assert [result[:3] for result in skipped] == [
        ("test_first", "passed", ""),
        ("test_marked", "failed", "it was skipped, which it is not on our code: Skipped: it is easy"),
        ("test_usual", "skipped", "Skipped: no GPU"),
        ("test_expected", "failed", "it was skipped, which it is not on our code: hard"),
    ]
    assert [result[1] for result in usual] == ["passed", "passed", "skipped", "passed"]
    assert (skipped_passed, usual_passed) == (False, True)


def test_a_file_of_tests_that_is_left_out_has_failed_too(tmp_path):
    [path], _ = answers(tmp_path, ["pass"])
    path.write_text("import unittest\nraise unittest.SkipTest('easy')\n")

    [(results, _, passed)] = run([path], "def test_one(): pass\n", CALLS)

    assert not passed
    why = "it was skipped, which it is not on our code: unittest.case.SkipTest: easy"
    assert ("failed", why) in [result[1:3] for result in results]


def test_an_end_before_all_tests_were_run_is_no_pass(tmp_path):
    [path], _ = answers(tmp_path, ["pass"])
    path.write_text(path.read_text() + "\n\ndef leave():\n    session.shouldstop = 'done'\n")

    [(results, trouble, passed)] = run([path], ENDS)

    assert [result[1:3] for result in results] == [("passed", "")]
    assert (trouble, passed) == ("the tests ended before test_second was done", False)


@pytest.mark.parametrize(("usual", "limit"), [(0.4, 10), (1.5, 30), (7, 60), (14, 60), (40, 160)])
def test_tests_may_take_a_multiple_of_what_our_code_takes(usual, limit):
    assert limit_of(usual) == limit


@pytest.mark.nightly
def test_how_long_our_code_takes_is_found_out_for_a_job_that_is_late(tmp_path):
    """Twice as long as the least limit: more than our code needs is not enough, and less than its multiple is."""
    slow = (
        "import time\nfrom minivllm.lora import mapping\n\n"
        "def test_slow():\n"
        "    until = time.process_time() + 1 + 3 * hasattr(mapping, 'SLOW')\n"
        "    while time.process_time() < until: pass\n"
    )
    [path], _ = answers(tmp_path, ["pass"])
    path.write_text(path.read_text() + "\nSLOW = True\n")

    [(results, trouble, passed)] = run([path], slow, settings={"ASK": 0.5, "MOST": 3})

    assert (results, trouble, passed) == ([("test_slow", "passed", "", None)], None, True)


@pytest.fixture
def watch(monkeypatch):
    """A watch of nobody, on which a second passes with each look, and that sees what it is told."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(limits.time, "monotonic", lambda: next(seconds))
    seen = []
    monkeypatch.setattr(limits, "use_of", lambda session: seen.pop(0))
    watch = Watch(0)

    def look(*uses):
        seen[:] = [Use(1, *use) for use in uses]
        return [watch.look() and watch.is_late(limit=10, patience=3) for _ in uses]

    return look


@pytest.mark.parametrize(
    ("uses", "said"),
    [
        ([(9.9, 0), (10.1, 0)], [None, "computing"]),
        ([(0.3, 0)] * 11, [None] * 10 + ["waiting"]),
        # On a busy machine: a hundredth of a core for each of a hundred programs.
        ([(0.01 * n, 0.99 * n) for n in range(200)], [None] * 200),
        ([(0.1 * n, 0) for n in range(31)], [None] * 30 + ["waiting"]),
    ],
    ids=["it computes too long", "it computes nothing", "it stands in line for a core", "a little at times"],
)
def test_whoever_computes_for_too_long_or_waits_for_what_never_comes_is_late(watch, uses, said):
    assert watch(*uses) == said


def test_what_processes_of_a_session_use_is_counted_together():
    code = (
        "import os, time\nos.setsid()\n"
        "for _ in range(2): os.fork()\n"
        "until = time.process_time() + 0.3\n"
        "while time.process_time() < until: pass\n"
        "print(flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        for _ in range(4):
            process.stdout.readline()

        use = limits.use_of(process.pid)

        assert use.processes == 4
        assert use.seconds >= 4 * 0.3 - 0.1
    finally:
        limits.os.killpg(process.pid, limits.signal.SIGKILL)
        process.wait()


def test_a_session_ends_with_the_process_that_has_started_it():
    leader = (
        "import os, sys, time\nfrom labs.kit.limits import end_with\nend_with(int(sys.argv[1]))\n"
        "if os.fork(): print(flush=True)\ntime.sleep(60)\n"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', {leader!r}, str(os.getpid())]\n"
        "subprocess.Popen(command, start_new_session=True).wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, cwd=ROOT)
    process.stdout.readline()

    process.kill()

    assert select.select([process.stdout], [], [], 30)[0], "what it has started goes on"
    assert process.stdout.read() == b""  # nobody has the other end
    process.wait()
