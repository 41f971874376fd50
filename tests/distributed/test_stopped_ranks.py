"""Ranks that a signal has stopped: continued in time they go on, else they have ended. No engine is needed."""

import os
import signal
import subprocess
import time
from multiprocessing import Pipe

import pytest

from minivllm.distributed import other_ranks
from minivllm.distributed.other_ranks import OtherRanks, is_stopped
from minivllm.faults import EngineDeadError


@pytest.fixture
def pipe():
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def sleeper(pipe):
    """A process that reads nothing and does nothing; the only one that has the pipe's other end."""
    _, theirs = pipe
    with subprocess.Popen(["sleep", "60"], pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        yield process
        process.kill()


@pytest.fixture
def others(pipe, sleeper, monkeypatch):
    """It as the only rank beside this one; looked at often, and seldom enough that it may be continued meanwhile."""
    monkeypatch.setattr(other_ranks, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(other_ranks, "SECONDS_STOPPED", 0.2)
    monkeypatch.setattr(other_ranks, "SECONDS_TO_STOP", 0.0)
    others = OtherRanks([pipe[0]], [sleeper])
    others._thread.start()
    yield others
    others.close()
    others._thread.join(5)


def comes_true(condition):
    until = time.monotonic() + 5
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()


def test_a_rank_that_is_stopped_and_not_continued_has_ended(sleeper, others):
    deaths = []
    others.on_death.append(lambda: deaths.append(others.error))

    sleeper.send_signal(signal.SIGSTOP)

    assert comes_true(lambda: deaths)
    assert "rank 1 of 2 has ended (stopped by a signal and not continued for 0.2 s)" in str(deaths[0])
    assert sleeper.returncode == -signal.SIGKILL
    with pytest.raises(EngineDeadError, match="stopped by a signal"):
        others.tell("launch")


def test_whoever_tells_it_more_than_a_pipe_holds_hears_of_its_end(sleeper, others):
    sleeper.send_signal(signal.SIGSTOP)

    with pytest.raises(EngineDeadError, match="stopped by a signal"):
        until = time.monotonic() + 10
        while time.monotonic() < until:  # what is told between its end and the hearing of it is lost
            others.tell("launch", bytes(100_000))


def test_a_rank_that_is_continued_has_its_time_anew(sleeper, others, monkeypatch):
    monkeypatch.setattr(other_ranks, "SECONDS_STOPPED", 1.0)
    for _ in range(4):
        sleeper.send_signal(signal.SIGSTOP)
        assert comes_true(lambda: is_stopped(sleeper.pid))
        time.sleep(0.3)  # 1.2 s in all
        sleeper.send_signal(signal.SIGCONT)
        time.sleep(0.1)

    assert others.error is None and sleeper.poll() is None


def test_whoever_sleeps_or_has_ended_is_not_stopped(sleeper):
    assert not is_stopped(sleeper.pid)

    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_stopped(sleeper.pid)
    sleeper.wait()
    assert not is_stopped(sleeper.pid)
