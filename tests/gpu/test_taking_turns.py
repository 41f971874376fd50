"""How tests of several processes share one GPU. Needs none: it is a lock on a file."""

import fcntl

import pytest

from tests.tools.device import taking_turns


@pytest.fixture
def others(tmp_path):
    """Whether another process would have to wait now, to run beside this one or alone."""

    def others(alone):
        with (tmp_path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                return "waits"
            return "runs"

    return others


def test_tests_run_beside_each_other_and_keep_out_who_must_be_alone(tmp_path, others):
    with taking_turns(alone=False, file=tmp_path / "lock"):
        during = others(alone=False), others(alone=True)

    assert during == ("runs", "waits")
    assert others(alone=True) == "runs"


def test_who_must_be_alone_keeps_out_all_others(tmp_path, others):
    with taking_turns(alone=True, file=tmp_path / "lock"):
        during = others(alone=False), others(alone=True)

    assert during == ("waits", "waits")
    assert others(alone=False) == "runs"
