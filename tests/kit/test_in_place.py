"""Changes that are put into functions of modules that are there: what can be, and that no verdict is another."""

import importlib.util

import pytest
from checkout import judged

from labs.kit import in_place
from labs.kit.forks import Job
from labs.kit.in_place import functions_of, put_of
from labs.kit.overlay import Source
from labs.kit.regions import edit, read_engine

MODULE = """
import functools

LIMIT = 3

def plain(n, more=1):
    return n + more

class Thing:
    size = 1

    def __init__(self):
        super().__init__()

    @property
    def value(self):
        return 5

    @value.setter
    def value(self, value):
        self.kept = value

    @staticmethod
    def made():
        return [n for n in range(3)]

    @functools.cached_property
    def once(self):
        def inner():
            return self.size
        return inner()
"""


@pytest.fixture
def put(tmp_path, monkeypatch):
    """The module, after a line of it was changed in place. None where that cannot be."""
    path = tmp_path / "made.py"
    path.write_text(MODULE)
    monkeypatch.setattr(in_place, "engine_file", lambda name: path)
    spec = importlib.util.spec_from_file_location("made", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def put(old, new):
        assert MODULE.count(old) == 1
        change = put_of("made", Source(f"{path} [changed]", MODULE.replace(old, new)), functions_of(module))
        if change is None:
            return None
        change()
        return module

    return put


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("n + more", "n - more", lambda m: m.plain(3) == 2),
        ("return 5", "\n        return 6", lambda m: m.Thing().value == 6),
        ("self.kept = value", "self.kept = 7", lambda m: setattr(t := m.Thing(), "value", 1) or t.kept == 7),
        ("[n for n", "[n + 1 for n", lambda m: m.Thing.made() == [1, 2, 3]),
        ("return self.size", "return self.size + 1", lambda m: m.Thing().once == 2),
    ],
)
def test_a_functions_body_is_changed_wherever_it_is_held(put, old, new, seen):
    assert seen(put(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("size = 1", "size = 2"),
        ("more=1", "more=2"),
        ("super().__init__()", "pass"),  # it no longer knows its class
        ("    @staticmethod\n", ""),
        ("LIMIT = 3", "LIMIT = 3  # a comment"),
    ],
)
def test_what_is_more_than_bodies_or_nothing_is_left_to_an_import(put, old, new):
    assert put(old, new) is None


CHANGES = [
    ["seen in place", "3.1", "slot_of_id[0] = -1", "slot_of_id[0] = -2"],
    [
        "seen by calls that are watched",
        "3.4",
        "    return runs\n",
        "    token_slots.clear()\n    return runs\n",
    ],
    ["seen by nobody", "3.1", "slot_of_id[0] = -1", "slot_of_id[0] = -1 * 1"],
]


def test_what_is_not_seen_in_place_is_run_again_with_the_checks_that_watch_calls():
    exercises = read_engine()
    jobs = [
        Job(key, number, {exercises[number].module: Source(key, edit(exercises[number], [(old, new)]))}, True)
        for key, number, old, new in CHANGES
    ]

    failed = {job.key: [r.test for r in outcome.of("failed")] for job, outcome in judged(jobs, changes=True)}

    assert failed["seen in place"][0].startswith("tests/phase_03/")
    assert failed["seen by calls that are watched"]
    assert failed["seen by nobody"] == []
