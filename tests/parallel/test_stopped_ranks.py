"""Ranks that a signal has stopped: continued in time they go on, else they have ended. No engine is needed."""

import os
import signal
import subprocess
from collections import Counter
from multiprocessing import Pipe

import pytest

from minivllm.errors import EngineDeadError
from minivllm.parallel import other_ranks
from minivllm.parallel.other_ranks import OtherRanks, is_stopped
from tests.worlds.waiting import PATIENCE, wait_until


@pytest.fixture
def pipe():
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def sleeper(pipe):
    """A process that reads nothing and does nothing; the only one that has the pipe's other end."""
    _, theirs = pipe
    with subprocess.Popen(["sleep", "3600"], pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        yield process
        process.kill()


@pytest.fixture
def unwatched(pipe, sleeper, monkeypatch):
    """It as the only rank beside this one. Ten looks in a row that find it stopped are too many."""
    monkeypatch.setattr(other_ranks, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(other_ranks, "SECONDS_STOPPED", 0.2)
    monkeypatch.setattr(other_ranks, "SECONDS_TO_STOP", 0.0)
    others = OtherRanks([pipe[0]], [sleeper])
    yield others
    others.close()


@pytest.fixture
def others(unwatched):
    """And it is looked at."""
    unwatched._thread.start()
    yield unwatched
    unwatched.close()
    unwatched._thread.join(PATIENCE)


def test_a_rank_that_is_stopped_and_not_continued_has_ended(sleeper, others):
    deaths = []
    others.on_death.append(lambda: deaths.append(others.error))

    sleeper.send_signal(signal.SIGSTOP)

    wait_until(lambda: deaths)
    assert "rank 1 of 2 has ended (stopped by a signal and not continued for 0.2 s)" in str(deaths[0])
    assert sleeper.returncode == -signal.SIGKILL
    with pytest.raises(EngineDeadError, match="stopped by a signal"):
        others.tell("launch")


def test_whoever_tells_it_more_than_a_pipe_holds_hears_of_its_end(sleeper, others):
    sleeper.send_signal(signal.SIGSTOP)

    with pytest.raises(EngineDeadError, match="stopped by a signal"):
        # What is told between its end and the hearing of it is lost.
        wait_until(lambda: others.tell("launch", bytes(100_000)))


def test_a_rank_that_is_continued_has_its_time_anew(sleeper, unwatched):
    looks = Counter()

    def look(times):
        for _ in range(times):
            unwatched._look_for_the_stopped(looks)

    for _ in range(4):
        sleeper.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(sleeper.pid))
        look(9)
        sleeper.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_stopped(sleeper.pid))
        look(1)

    assert unwatched.error is None and sleeper.poll() is None
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper.pid))
    look(10)
    assert unwatched.error is not None and sleeper.poll() is not None


def test_whoever_sleeps_or_has_ended_is_not_stopped(sleeper):
    assert not is_stopped(sleeper.pid)

    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_stopped(sleeper.pid)
    sleeper.wait()
    assert not is_stopped(sleeper.pid)
