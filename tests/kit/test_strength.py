"""`lab mutants --generic`: what is changed, what counts as equivalent, and how much of it tests must see."""

import ast
import re

import pytest
from checkout import Checkout

from labs.kit.mutations import mutations_of
from labs.kit.regions import PHASES, Exercise, find_regions, read_engine
from labs.kit.strength import SAMPLE_WANTED, equivalents_of
from tests.tools.nights import of_night

MODULE = '''"""A module."""


def outside(n):
    return n + 1


# region lab 9.1: tried
def pick(rows: list[int] = None, limit: int = 3) -> list[int]:
    """The rows below a limit."""
    if not rows:
        raise ValueError("no rows")
    found = [int(row) for row in rows if row < limit]
    return clip(found, rows)[: len(found)]
# endregion
'''


TRIED = Exercise("9.1", "tried", MODULE, find_regions(MODULE, "tried"))
CHANGES = {
    "if not rows:": ["if False:", "if True:", "if rows:"],
    'raise ValueError("no rows")': ["pass"],
    "found = [int(row) for row in rows if row < limit]": [
        "found = [(row) for row in rows if row < limit]",
        "found = [int(row) for row in rows if row <= limit]",
        "found = [int(row) for row in rows if True]",
    ],
    "return clip(found, rows)[: len(found)]": [
        "return clip(rows, found)[: len(found)]",
        "return clip(found, rows)[: (len(found)) + 1]",
        "pass",
    ],
}


@pytest.mark.parametrize("old", CHANGES)
def test_conditions_bounds_arguments_conversions_and_statements_change(old):
    assert set(CHANGES[old]) <= {m.new.strip() for m in mutations_of(TRIED) if m.old.strip() == old}


def test_only_code_inside_regions_changes():
    """Signatures are the course's, docstrings and annotations do nothing."""
    for mutation in mutations_of(TRIED):
        kept = [line for line in MODULE.split("\n") if "outside" in line or "def " in line or '"""' in line]

        assert [line for line in mutation.text.split("\n") if line in kept] == kept
        assert "return n + 1" in mutation.text
        assert mutation.function == "pick"


def test_every_change_is_another_program():
    made = [ast.dump(ast.parse(text)) for text in [MODULE, *(m.text for m in mutations_of(TRIED))]]

    assert len(made) > 20
    assert len(set(made)) == len(made)


def test_a_few_changes_are_the_same_few_in_every_run():
    every = [mutation.key for mutation in mutations_of(TRIED)]

    few, again = ([m.key for m in mutations_of(TRIED, at_most=5)] for _ in range(2))

    assert few == again
    assert len(few) == 5
    assert set(few) <= set(every)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("strength"))


@pytest.fixture
def equivalents(shared):
    """The file of phase 3, as it was afterwards."""
    path = shared.file("3.1").with_name("equivalent.toml")
    held = path.read_text() if path.is_file() else ""
    yield path
    path.write_text(held)


LISTED = '''
[["3.1"]]
function = "slots_of"
old = """
{old}
"""
new = """
{new}
"""
reason = "Tried."
'''


@pytest.mark.nightly
def test_what_is_listed_and_seen_by_a_test_is_named(shared, equivalents):
    equivalents.write_text(LISTED.format(old="slot_of_id[0] = -1", new="slot_of_id[0] = -2"))

    result = shared.lab("mutants", "--generic", "3.1")

    seen = "in slots_of, 'slot_of_id[0] = -1' to 'slot_of_id[0] = -2' is not equivalent: a test sees it"
    assert seen in result.stdout
    assert result.returncode == 1


@pytest.mark.nightly
def test_what_no_test_sees_is_shown_and_counts_and_what_is_listed_must_be_a_change(shared, equivalents):
    equivalents.write_text(LISTED.format(old="slot_of_id[0] = -1", new="slot_of_id[0] = -7"))
    tests = shared.root / "tests/phase_03/test_slot_mapping.py"
    held, alone = tests.read_text(), tests.with_name("test_alone.py")
    tests.write_text(held.replace('lab("3.1")', 'lab("3.9")'))
    alone.write_text(ONE_TEST)

    result = shared.lab("mutants", "--generic", "3.1")

    tests.write_text(held)
    alone.unlink()
    assert "    - slot_of_id[0] = -1\n    + slot_of_id[0] = -2" in result.stdout
    killed, tried = map(int, re.search(r"3\.1: (\d+) of (\d+) changes are seen", result.stdout).groups())
    assert 0 < killed < tried
    none = "in slots_of, 'slot_of_id[0] = -1' to 'slot_of_id[0] = -7' is no change of the code"
    assert none in result.stdout
    assert result.returncode == 1


ONE_TEST = """
import pytest
from minivllm.lora.mapping import slots_of


@pytest.mark.lab("3.1")
def test_alone():
    assert slots_of((7,), [None, 7]) == [1]
"""


def test_no_equivalent_is_listed_twice():
    for exercise in read_engine().values():
        entries = equivalents_of(exercise)

        assert len({entry.key for entry in entries}) == len(entries), exercise.number


def score(said):
    numbers = re.findall(r"^\d+\.\d+: (\d+) of (\d+) changes are seen$", said, re.MULTILINE)
    killed, tried = (sum(map(int, column)) for column in zip(*numbers))
    return killed / tried


@pytest.mark.nightly
def test_tests_see_most_of_a_sample_of_changes(shared):
    result = shared.lab("mutants", "--generic", "--sample")

    assert score(result.stdout) >= SAMPLE_WANTED, result.stdout
    assert result.returncode == 0


@pytest.mark.nightly
@pytest.mark.parametrize("phase", of_night([int(phase[:2]) for phase in PHASES], 6))
def test_tests_see_what_changes_in_a_phase(shared, phase):
    result = shared.lab("mutants", "--generic", str(phase))

    assert result.returncode == 0, result.stdout
