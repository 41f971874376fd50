"""What a failed assertion says to a learner: no word of pytest's own."""

import pytest
from checkout import Checkout

from labs.kit.commands.check import name_of, say_grade
from labs.kit.commands.shared import console
from labs.kit.forks import Outcome, Result
from labs.kit.grade import Grade
from labs.kit.regions import read_engine
from labs.kit.sentences import of_comparison, shown

TESTS = """
import pytest
import torch


class Thing:
    is_ready = False

    def parts(self):
        return [1, 2]


@pytest.mark.lab("5.1")
@pytest.mark.parametrize("number", range(9))
def test_what_fails(number):
    found, thing = [1], Thing()
    if number == 0:
        assert found == [1, 2]
    if number == 1:
        assert found == [1, 2], "one part each"
    if number == 2:
        assert thing.is_ready
    if number == 3:
        assert not torch.ones(2).any()
    if number == 4:
        assert not found, "nothing was expected"
    if number == 5:
        with pytest.raises(ValueError):
            pass
    if number == 6:
        with pytest.raises(ValueError, match="adapter 7"):
            raise ValueError("adapter 8")
    if number == 7:
        assert thing.parts() is not None and len(thing.parts()) == 3
    if number == 8:
        thing.table = torch.arange(12)
        assert torch.equal(thing.table, torch.ones(2))


@pytest.mark.lab("5.2")
def test_of_another_exercise():
    assert False


def test_of_none():
    assert False
"""
SAID = [
    "found is not what it should be\n  expected [1, 2]\n  got      [1]",
    "one part each\n  expected [1, 2]\n  got      [1]",
    "this should hold, and does not: thing.is_ready\n  Thing.is_ready is False",
    "this should hold, and does not: not torch.ones(2).any()\n",
    "nothing was expected",
    "ValueError was to be raised here, and nothing was",
    "the error was to say 'adapter 7', and says 'adapter 8'",
    "this should hold, and does not: thing.parts() is not None and len(thing.parts()) == 3\n  expected 3\n  got      2",
    "this should hold, and does not: torch.equal(thing.table, torch.ones(2))\n"
    "  equal(tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11]), tensor([1., 1.])) is False\n",
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the nine cases say, in their order: of a file only tests with the exercise's mark are its own."""
    checkout = Checkout(tmp_path_factory.mktemp("sentences"))
    (checkout.root / "tests" / "phase_05" / "test_said.py").write_text('# mark.lab("5.1")' + TESTS)
    code = (
        "from labs.kit.forks import Job, run\nfrom labs.kit.overlay import learners_sources\n"
        "[(_, outcome)] = run([Job(None, '5.1', learners_sources('5.1'))])\n"
        "print('\\0'.join(r.message for r in outcome.results if 'test_said' in r.test), end='')"
    )
    result = checkout.execute(code)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")


@pytest.mark.parametrize("number", range(8))
def test_a_failure_is_told_in_sentences(said, number):
    assert said[number].startswith(SAID[number])


def test_nothing_of_pytests_own_is_left(said):
    assert len(said) == 9
    for text in said:
        assert not any(
            word in text for word in ("assert ", "Use -v", "built-in", "0x", "DID NOT RAISE", "Regex")
        )


@pytest.mark.parametrize(
    ("left", "right", "more"),
    [
        ([1, 2, 3, 5], [1, 2, 4, 5], ["the first to differ is number 2: expected 4, got 3"]),
        ([1, 2, 3], [1, 2, 3, 4], ["the first to differ is number 3: expected 4, got nothing"]),
        (
            {"a": 1, "b": 2},
            {"a": 1, "c": 3},
            ["for 'c': expected 3, got nothing", "for 'b': expected nothing, got 2"],
        ),
        ({1, 2}, {2, 3}, ["lacking: 3", "too many: 1"]),
        ("abcd", "abce", []),
        (1, 2, []),
    ],
)
def test_where_two_collections_differ_is_said(left, right, more):
    _, expected, got, *rest = of_comparison("==", left, right)

    assert (expected, got) == (f"expected {right!r}", f"got      {left!r}")
    assert rest == more


@pytest.mark.parametrize(
    ("op", "lines"),
    [
        ("in", ["expected 1", "in       [2]"]),
        ("not in", ["expected nothing that is in [2]", "got      1"]),
        ("!=", ["expected anything but [2]", "got      1"]),
        ("<", ["expected a value < [2]", "got      1"]),
        ("is", ["expected [2]", "got      1"]),
    ],
)
def test_every_comparison_has_words_of_its_own(op, lines):
    assert of_comparison(op, 1, [2])[1:] == lines


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/a.py::test_one", "test_one"),
        ("tests/a.py::Test::test_one[ids0-missing0]", "Test::test_one"),
        ("tests/a.py::test_one[bgmv-float32]", "test_one[bgmv-float32]"),
        ("tests/a.py::test_one[3-2]", "test_one[3-2]"),
        ("tests/a.py::test_one[bfloat16]", "test_one[bfloat16]"),
        ("tests/a.py::test_one[float64-ranks0]", "test_one[float64-ranks0]"),
        ("tests/a.py", "tests/a.py"),
    ],
)
def test_a_case_is_named_where_somebody_has_named_it(test, name):
    assert name_of(test) == name


@pytest.mark.parametrize(
    ("cases", "names"),
    [
        (["ids0", "ids1"], ["test_one[ids0]", "test_one[ids1]"]),
        (["ids1"], ["test_one"]),
    ],
    ids=["two", "one"],
)
def test_cases_that_nobody_has_named_are_told_apart_where_several_fail(cases, names):
    failed = [Result(f"tests/a.py::test_one[{case}]", "failed", f"NameError: {case}") for case in cases]
    grade = Grade(read_engine()["3.2"], "failed", Outcome(failed), "")

    with console.capture() as said:
        say_grade(grade, trace=False)

    assert [line.strip() for line in said.get().split("\n") if "test_one" in line] == names


def test_a_long_value_is_cut_and_an_object_is_its_class():
    assert len(shown("x" * 999)) == 200
    assert shown([object()]) == "[object]"
