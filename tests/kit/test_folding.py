"""`lab diff` shows what differs between two versions of an exercise, and not what both of them say."""

import ast

import pytest

from labs.kit.folding import beside, differing, signed
from labs.kit.regions import read_engine
from labs.kit.variants import with_variant

TWO = '''\
class Table:
    """What both say of the table."""

    def first(self, key):
        """Both say this.

        At length.
        """
        return self.rows[key]

    def second(self, key):
        """And this."""
        return {second}
'''


def test_docstrings_are_folded_and_functions_that_do_the_same_are_named_in_a_line():
    mine, theirs = (TWO.format(second=body) for body in ("self.rows.get(key)", "self.rows[-key]  # a reason"))

    yours, ours = beside(mine.replace("At length.", "To use: rows."), theirs)

    assert "say" not in yours + ours and "At length" not in yours + ours
    assert yours.count('"""..."""') == ours.count('"""..."""') == 2  # of the class and of what differs
    assert "def first(self, key):\n        ...  # the same in both\n" in yours
    assert "def first(self, key):\n        ...  # the same in both\n" in ours
    assert "        return self.rows.get(key)\n" in yours
    assert "        return self.rows[-key]  # a reason\n" in ours


def test_lines_that_the_other_has_not_have_a_sign():
    yours, ours = "def f(a):\n    b = 2\n\n    return b\n", "def f(a):\n    return a\n"

    marks = differing(yours, ours)

    assert marks == ({2, 4}, {2})
    assert signed(yours, marks[0]) == "  def f(a):\n>     b = 2\n\n>     return b\n"
    assert signed(ours, marks[1]) == "  def f(a):\n>     return a\n"


@pytest.mark.parametrize(
    ("yours", "ours"),
    [
        ("def f(a):\n    return 1\n", "def f(a, b=0):\n    return 1\n"),
        ('def f(:\n    """Said."""\n', 'def f():\n    """Said."""\n'),
    ],
    ids=["another signature", "what Python cannot read"],
)
def test_what_differs_as_a_whole_is_shown_whole(yours, ours):
    assert beside(yours, ours) == (yours, ours)


@pytest.mark.parametrize("exercise", read_engine().values(), ids=lambda exercise: exercise.number)
def test_beside_a_variant_nothing_of_an_exercise_is_lost_but_docstrings(exercise):
    own, other = exercise.code(), exercise.code(with_variant(exercise))

    yours, ours = beside(own, other)

    for text, whole in ((yours, own), (ours, other)):
        assert names(text) == names(whole)
        documented = [n for n in ast.walk(ast.parse(text)) if said_by(n) not in (None, "...")]
        assert documented == []
    assert yours != ours


def names(text):
    """Functions that are not part of another."""
    tree = ast.parse(text)
    owners = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    return {n.name for o in owners for n in o.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def said_by(node):
    is_documented = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return ast.get_docstring(node) if is_documented else None
