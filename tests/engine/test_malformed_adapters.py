"""300 malformed adapters against an engine with a running batch; `python tests/engine/malformed.py` sends 10,000.

In a process of its own: what it takes at most is the kernel's to say, and a bomb must not take the test run with it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("malformed.py")


@pytest.fixture(scope="module")
def report():
    command = [sys.executable, SCRIPT, "--adapters", "300", "--seed", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=SCRIPT.parents[2])
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_is_refused_in_a_sentence_and_changes_nothing(report):
    """Seconds are for the script: here other tests take theirs."""
    assert [fault for fault in report["faults"] if " took " not in fault or " MB: " in fault] == []


def test_no_refusal_takes_seconds(report):
    seconds, *_ = report["slowest"][0]

    assert seconds < 10, report["slowest"][0]


def test_whoever_runs_meanwhile_gets_the_same_tokens(report):
    assert report["answers"] > 50


def test_it_was_an_attack(report):
    outcomes = report["outcomes"]

    assert sum(outcomes.values()) == 300
    assert outcomes["ValueError"] > 100
    assert outcomes["FileNotFoundError"] > 10
    assert outcomes["failed alone"] > 10
    assert outcomes["served"] > 10
