"""What a learner has done is kept when several commands note something beside each other."""

import multiprocessing

import pytest

from labs.kit import progress
from labs.kit.progress import Progress


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "FOLDER", tmp_path / "lab")


def test_a_hint_that_was_given_while_a_check_ran_is_kept(folder):
    check = Progress()
    hint = Progress()
    with hint.changing():
        hint.hints["5.1"] = 1

    check.remember("7.1", "digest")

    now = Progress()
    assert (now.hints, now.passed) == ({"5.1": 1}, {"7.1": "digest"})


def remember(who):
    for number in range(20):
        Progress().remember(f"{who}.{number}", "digest")


def test_nothing_is_lost_of_what_four_processes_note(folder):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=remember, args=(who,)) for who in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert len(Progress().passed) == 80


def test_what_fails_on_its_way_changes_nothing(folder):
    Progress().remember("1.2", "digest")

    with pytest.raises(KeyboardInterrupt), (changed := Progress()).changing():
        changed.passed.clear()
        raise KeyboardInterrupt

    assert Progress().passed == {"1.2": "digest"}
