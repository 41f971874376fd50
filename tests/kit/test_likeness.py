"""Which known mistakes failures look like, on tests that break by hand: no process is started."""

import pytest

from labs.kit import likeness
from labs.kit.forks import Outcome, Result
from labs.kit.likeness import likenesses
from labs.kit.mutants import Mutant
from labs.kit.regions import read_engine

EXERCISE = read_engine()["3.2"]


def outcome(failures, trouble=None):
    """failures: test -> what it says"""
    return Outcome([Result(test, "failed", message) for test, message in failures.items()], trouble)


@pytest.fixture
def compare(monkeypatch):
    """Names of the mistakes that failures look like, and how: each mistake breaks what it is said to break.

    breaks   name of a mistake, or of two made together ("a+b") -> test -> what it says
    """

    def compare(mine, breaks, trouble=None):
        def run(jobs, limit):
            for job in jobs:
                broken = breaks.get("+".join(sorted(m.name for m in job.key)), {})
                kept = {t: said for t, said in broken.items() if job.only is None or t in job.only}
                yield job, outcome(kept, broken.get(""))

        monkeypatch.setattr(likeness, "run", run)
        monkeypatch.setattr(Mutant, "sources", lambda mutant: {"module": None})
        mistakes = [Mutant(name, EXERCISE, name, [(name, name)]) for name in breaks if "+" not in name]
        found = likenesses(mistakes, outcome(mine, trouble))
        return [("+".join(sorted(m.name for m in one.mistakes)), one.is_sure, one.is_all) for one in found]

    return compare


ROWS = {f"t{n}": f"row {n} is wrong" for n in range(9)}
# What fails, what mistakes break, and the mistakes that are named: whether surely, and whether they explain all.
LOOKS = {
    "the same failures": (
        {"t1": "a", "t2": "b"},
        {"mine": {"t1": "a", "t2": "b"}, "other": {"t3": "c"}},
        [("mine", True, True)],
    ),
    "among others": (
        {**ROWS, "t9": "something else"},
        {"mine": {t: ROWS[t] for t in ("t1", "t2", "t3")}, "other": {"t1": "nothing alike"}},
        [("mine", True, False)],
    ),
    "the larger of two that fit": (
        {"t1": "a", "t2": "b", "t3": "c"},
        {"small": {"t1": "a"}, "large": {"t1": "a", "t2": "b"}},
        [("large", True, False)],
    ),
    "one mistake in two places": (
        {"shrink": "columns past R", "expand": "columns past N"},
        {"in shrink": {"shrink": "columns past R"}, "in expand": {"expand": "columns past N"}},
        [("in expand", True, False), ("in shrink", True, False)],
    ),
    "two that look so only together: of a test that both break a third thing is said": (
        {"t1": "off by both", "t2": "b", "t3": "c", "t4": "d"},
        {
            "a": {"t1": "off by a", "t2": "b"},
            "c": {"t1": "off by c", "t3": "c"},
            "a+c": {"t1": "off by both", "t2": "b", "t3": "c", "t4": "d"},
        },
        [("a+c", True, True)],
    ),
    "other numbers are near and not the same": (
        {"t1": "expected [1.5, nan], got [-2e-05, inf] at 0x7f01", "t2": "the same"},
        {"near": {"t1": "expected [1.5, 2], got [7, 1] at 0x7fff", "t2": "the same"}},
        [("near", False, False)],
    ),
    "addresses count for nothing": (
        {"t1": "<X at 0x7f01>"},
        {"mine": {"t1": "<X at 0x7f02>"}},
        [("mine", True, True)],
    ),
    "nothing in common": ({"t1": "a"}, {"other": {"t1": "b"}, "another": {"t2": "a"}, "none": {}}, []),
    # Code that does nothing fails every test, and so holds all that most mistakes break.
    "next to nothing is explained": (ROWS, {"other": {"t0": ROWS["t0"]}}, []),
}


@pytest.mark.parametrize("how", LOOKS)
def test_a_mistake_is_named_that_failures_look_like(compare, how):
    mine, breaks, named = LOOKS[how]

    assert compare(mine, breaks) == named


def test_what_ends_the_tests_is_compared_too(compare):
    breaks = {"crash": {"": "the process ended"}, "other": {"t1": "a"}}

    assert compare({}, breaks, trouble="the process ended") == [("crash", True, True)]
