"""The processes that run exercises' tests: one that hangs is named, and holds up nobody else."""

import pytest
from checkout import judged

from labs.kit.forks import Job

# Only once the other test is through, however busy the machine is.
QUICK_IS_THROUGH = "    while not os.path.exists(os.path.dirname(__file__) + '/through'): pass\n"
HANGS = {
    "waits": f"{QUICK_IS_THROUGH}    threading.Event().wait()  # here\n",
    "computes": f"{QUICK_IS_THROUGH}    while True: pass  # here\n",
}
QUICK = "    open(os.path.dirname(__file__) + '/through', 'w').close()\n"
LEAVES_A_PROCESS = "    if not os.fork():\n        time.sleep(60)\n    os.abort()\n"


def run(limit, *files):
    """(file, results, trouble) of every job, in the order in which they ended."""
    jobs = [Job(str(file), "3.2", {}, files=(file,)) for file in files]
    return [
        (
            job.key,
            [(r.test.partition("::")[2], r.outcome, r.message, r.asked) for r in outcome.results],
            outcome.trouble,
        )
        for job, outcome in judged(jobs, limit=limit, at_a_time=2)
    ]


def write(path, body):
    path.write_text(f"import os, threading, time\n\ndef test_first(): pass\n\ndef test_it():\n{body}")
    return path


@pytest.mark.parametrize(
    ("body", "what"),
    [(HANGS["waits"], "waiting"), pytest.param(HANGS["computes"], "computing", marks=pytest.mark.nightly)],
    ids=HANGS,
)
def test_a_test_without_an_end_is_told_with_its_line_and_others_are_not_held_up(body, what, tmp_path):
    hanging = write(tmp_path / "test_hanging.py", body)
    quick = write(tmp_path / "test_quick.py", QUICK)

    first, second = run(2, hanging, quick)

    line = hanging.read_text().split("\n").index(next(s for s in body.split("\n") if "here" in s)) + 1
    assert first == (str(quick), [(name, "passed", "", "") for name in ("test_first", "test_it")], None)
    path, [passed, [name, outcome, message, asked]], trouble = second
    assert (path, passed[1], trouble) == (str(hanging), "passed", None)
    assert (name, outcome, message) == ("test_it", "failed", f"no end after 2 s of {what}")
    assert asked.endswith(f"test_hanging.py:{line}")


def test_a_process_that_a_test_has_left_behind_holds_up_nobody(tmp_path):
    [[_, results, trouble]] = run(20, write(tmp_path / "test_leaving.py", LEAVES_A_PROCESS))

    assert [name for name, *_ in results] == ["test_first"]
    assert trouble == "the tests' process ended before they did, in test_it"


def test_an_address_outside_a_process_is_named_as_what_ended_it(tmp_path):
    [[_, _, trouble]] = run(20, write(tmp_path / "test_outside.py", "    os.kill(os.getpid(), 11)\n"))

    assert trouble == "the tests' process ended before they did, by an address outside its memory, in test_it"
