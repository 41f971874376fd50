"""What a learner is told of mistakes that say little by themselves, and of what the code has printed."""

import ast

import pytest
from checkout import judged

from labs.kit import missing_returns
from labs.kit.forks import Job, Outcome, Result
from labs.kit.likeness import is_plain
from labs.kit.missing_returns import returning_nothing
from labs.kit.overlay import Source
from labs.kit.regions import edit, read_engine

# Exercise, lines of ours and what stands in their place; what is said of it.
WRONG = {
    "no return": (
        ("3.4", "    return runs\n", ""),
        "`compute_runs` can end without a value, and then gives None: is a `return` missing?\n"
        "slots of the rows: []; got None, expected []",
    ),
    "no return in a method": (
        ("1.4", "        return self\n", ""),
        "`LoRALayerWeights.optimize` can end without a value, and then gives None: is a `return` missing?\n",
    ),
    "the table is changed": (
        ("3.1", "    slot_of_id[0] = -1\n", "    slot_of_id[0] = -1\n    lora_index_to_id.reverse()\n"),
        "the table of slots was changed: it was [3, 7], and is [7, 3]",
    ),
    "the slots of rows are changed": (
        ("3.4", "    return runs\n", "    token_slots.clear()\n    return runs\n"),
        "the slots of the rows were changed: they were [-1], and are []",
    ),
    "a breakpoint": (
        ("3.4", "    return runs\n", "    breakpoint()\n    return runs\n"),
        "BdbQuit: a debugger has no terminal here; `lab debug 3.4` runs the exercise's tests in yours",
    ),
    "too much memory": (
        ("3.4", "    return runs\n", "    return [bytearray(5 << 30)]\n"),
        "MemoryError: the tests may take 3 GiB of memory beside what they begin with, and this takes more",
    ),
}


@pytest.fixture(scope="module")
def said():
    """Mistake -> what is said."""
    jobs = []
    for name, ((number, old, new), _) in WRONG.items():
        exercise = read_engine()[number]
        source = Source(f"{name}.py", edit(exercise, [(old, new)]))
        jobs.append(Job(name, number, {exercise.module: source}, stop_at_first=True))
    return {job.key: outcome.of("failed")[0].message for job, outcome in judged(jobs)}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(said, name):
    assert said[name].startswith(WRONG[name][1])


@pytest.mark.parametrize(
    ("body", "may"),
    [
        ("return 1", False),
        ("pass", True),
        ("if a:\n return 1", True),
        ("if a:\n return 1\nelse:\n return 2", False),
        ("if a:\n return 1\nelif b:\n return 2", True),
        ("for x in a:\n return x", True),
        ("for x in a:\n pass\nelse:\n return 1", False),
        ("while True:\n a()", False),
        ("while True:\n if a:\n  break", True),
        ("while a:\n return 1", True),
        ("with a:\n return 1", False),
        ("try:\n return a()\nexcept ValueError:\n return 1", False),
        ("try:\n return a()\nexcept ValueError:\n pass", True),
        ("try:\n a()\nfinally:\n return 1", False),
        ("match a:\n case 1:\n  return 1", True),
        ("match a:\n case 1:\n  return 1\n case _:\n  return 2", False),
        ("raise ValueError", False),
        ("return", True),
        ("if a:\n return None\nreturn 1", True),
        ("def inner():\n pass\nreturn inner", False),
        ("return [lambda: None for _ in a]", False),
    ],
)
def test_a_function_that_may_end_without_a_value_is_found(body, may):
    [function] = ast.parse("def f(a):\n" + "".join(f" {line}\n" for line in body.split("\n"))).body

    assert missing_returns._gives_nothing(function) is may


def test_what_gives_nothing_in_our_code_too_is_not_said_of_a_learners(tmp_path, monkeypatch):
    ours = (
        "def may():\n    return None\n\ndef must():\n    return 1\n\n"
        "class C:\n    def must(self):\n        return 1\n"
    )
    (tmp_path / "ours.py").write_text(ours)
    monkeypatch.setattr(missing_returns, "engine_file", lambda module: tmp_path / "ours.py")

    assert returning_nothing("m", ours.replace("return 1", "1")) == ("must", "C.must")
    assert returning_nothing("m", ours) == ()
    assert returning_nothing("m", "def must():\n    yield 1\n") == ()
    assert returning_nothing("m", "def (") == ()


@pytest.mark.parametrize(
    ("messages", "plain"),
    [
        (["NameError: name 'x' is not defined"], True),
        (["BdbQuit: a debugger", "SystemExit: 0"], True),
        (["your code skips the test (Skipped: x)"], True),
        (["NameError: name 'x' is not defined", "row 1 is wrong"], False),
        (["IndexError: list index out of range"], False),
    ],
)
def test_failures_that_say_all_themselves_are_compared_with_no_known_mistake(messages, plain):
    outcome = Outcome([Result(f"t{n}", "failed", message) for n, message in enumerate(messages)])

    assert is_plain(outcome) is plain
