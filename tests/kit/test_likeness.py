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


def test_the_same_failures_are_the_same_mistake(compare):
    broken = {"t1": "row 1 is wrong", "t2": "row 2 is wrong"}

    found = compare(broken, {"mine": broken, "other": {"t3": "row 3 is wrong"}})

    assert found == [("mine", True, True)]


def test_a_mistake_whose_failures_are_among_others_is_named(compare):
    mine = {f"t{n}": f"row {n} is wrong" for n in range(9)} | {"t9": "something else"}

    found = compare(
        mine, {"mine": {t: mine[t] for t in ("t1", "t2", "t3")}, "other": {"t1": "nothing alike"}}
    )

    assert found == [("mine", True, False)]


def test_the_larger_of_two_that_fit_is_named(compare):
    mine = {"t1": "a", "t2": "b", "t3": "c"}

    found = compare(mine, {"small": {"t1": "a"}, "large": {"t1": "a", "t2": "b"}})

    assert [name for name, *_ in found] == ["large"]


def test_one_mistake_made_in_two_places_is_named_twice(compare):
    mine = {"shrink": "columns past R", "expand": "columns past N"}

    found = compare(
        mine, {"in shrink": {"shrink": "columns past R"}, "in expand": {"expand": "columns past N"}}
    )

    assert found == [("in expand", True, False), ("in shrink", True, False)]


def test_two_mistakes_that_look_alike_only_together_are_named_together(compare):
    """Both break one test, which says a third thing when both are there."""
    mine = {"t1": "off by both", "t2": "b", "t3": "c", "t4": "d"}
    breaks = {
        "a": {"t1": "off by a", "t2": "b"},
        "c": {"t1": "off by c", "t3": "c"},
        "a+c": mine,
    }

    assert compare(mine, breaks) == [("a+c", True, True)]


def test_other_numbers_are_near_and_not_the_same(compare):
    mine = {"t1": "expected [1.5, nan], got [-2e-05, inf] at 0x7f01", "t2": "the same"}
    near = {"t1": "expected [1.5, 2], got [7, 1] at 0x7fff", "t2": "the same"}

    assert compare(mine, {"near": near}) == [("near", False, False)]


def test_addresses_count_for_nothing(compare):
    assert compare({"t1": "<X at 0x7f01>"}, {"mine": {"t1": "<X at 0x7f02>"}}) == [("mine", True, True)]


def test_what_has_nothing_in_common_is_not_offered(compare):
    assert compare({"t1": "a"}, {"other": {"t1": "b"}, "another": {"t2": "a"}, "none": {}}) == []


def test_a_mistake_that_explains_next_to_nothing_is_not_named(compare):
    """Code that does nothing fails every test, and so holds all that most mistakes break."""
    mine = {f"t{n}": f"row {n} is wrong" for n in range(9)}

    assert compare(mine, {"other": {"t0": mine["t0"]}}) == []


def test_what_ends_the_tests_is_compared_too(compare):
    found = compare(
        {}, {"crash": {"": "the process ended"}, "other": {"t1": "a"}}, trouble="the process ended"
    )

    assert found == [("crash", True, True)]
