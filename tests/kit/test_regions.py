"""Regions of a module, the stubs that stand for them, and edits inside them."""

import ast
import re

import pytest

from labs.kit.regions import (
    Exercise,
    LabError,
    code_of,
    edit,
    find_regions,
    read_engine,
    splice,
    starter,
    unsolved,
)

FUNCTIONS = '''"""A module."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LIMIT = 3


# region lab 3.1: add, "quoted"
def add(a: int, b: int = LIMIT) -> int:
    """The sum.

    It may be negative.
    """
    # Both are small.

    total = a + b
    return total


class Adder:
    """Adds."""

    size = 4

    @property
    def twice(self) -> int:
        return 2 * self.size


# endregion


# region lab 3.2: a kernel
@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    """Nothing."""
    tl.store(x_ptr, 0)


# endregion


def sums(values):
    """Running sums."""
    total, found = 0, []
    # region lab 3.3: running sums
    # One at a time.
    for value in values:
        total += value
        found.append(total)
    # endregion
    return found


def more():
    # region lab 3.3: more of it
    return 7
    # endregion
'''


def engine(tmp_path, **modules):
    """A checkout with these modules as its engine."""
    for name, text in modules.items():
        (tmp_path / "minivllm").mkdir(exist_ok=True)
        (tmp_path / "minivllm" / f"{name}.py").write_text(text)
    return tmp_path


def module(*regions):
    """A module whose functions are regions of these exercises."""
    return "\n".join(
        f"# region lab {number}: something\ndef f{i}():\n    return {i}\n# endregion\n"
        for i, number in enumerate(regions)
    )


ADD = """def add(a: int, b: int = LIMIT) -> int:
    \"\"\"The sum.

    It may be negative.
    \"\"\"
    # Both are small.

    raise Todo("lab 3.1: add, \\\"quoted\\\"")


class Adder:
    \"\"\"Adds.\"\"\"

    size = 4

    @property
    def twice(self) -> int:
        raise Todo("lab 3.1: add, \\\"quoted\\\"")
"""
SUMS = """    total, found = 0, []
    # region lab 3.3: running sums
    # One at a time.
    raise Todo("lab 3.3: running sums")
    # endregion
    return found
"""
KERNEL = '    """Nothing."""\n    tl.static_assert(False, "lab 3.2: a kernel")\n'


@pytest.mark.parametrize(
    "stub",
    [ADD, SUMS, KERNEL],
    ids=["a function keeps all but its body", "statements their first comment", "a kernel does not compile"],
)
def test_a_stub_keeps_what_is_no_answer(stub):
    assert stub in starter(FUNCTIONS, "it")


def test_a_starter_has_every_exercise_to_do_and_imports_todo_where_that_is_allowed():
    stub = starter(FUNCTIONS, "it")

    ast.parse(stub)
    places = [
        stub.index(line) for line in ("__future__", "from labs.kit.overlay import Todo", "import torch")
    ]
    assert places == sorted(places)
    assert [r.exercise for r in find_regions(stub, "it")] == ["3.1", "3.2", "3.3", "3.3"]
    assert unsolved(stub) == ["3.1", "3.2", "3.3"]
    assert unsolved(FUNCTIONS) == []


POOL = """class Pool:
    # region lab 3.2: slots
    def free(self):
        \"\"\"Which are free.\"\"\"
        return self.slots

    def put(self, key):
        \"\"\"Takes a slot.

        KeyError if none is free.
        \"\"\"
        self.slots.pop(key)
    # endregion
"""
POOL_TO_DO = """class Pool:
    # region lab 3.2: slots
    def free(self):
        \"\"\"Which are free.

        To use: `slots` of the pool.
        \"\"\"
        raise Todo("lab 3.2: slots")

    def put(self, key):
        \"\"\"Takes a slot.

        KeyError if none is free.

        To use: `free`.
        \"\"\"
        raise Todo("lab 3.2: slots")
    # endregion
"""


def test_recipes_end_the_docstrings_of_their_functions():
    recipes = {"3.2": {"free": "`slots` of the pool.", "put": "`free`."}, "3.3": {"elsewhere": "anything"}}

    stub = starter(POOL, "it", recipes)

    assert stub.endswith(POOL_TO_DO)
    assert splice(stub, POOL, (), "it")[0].endswith(POOL)


def test_a_recipe_for_a_function_that_is_gone_or_has_no_docstring_is_refused():
    with pytest.raises(LabError, match=r"lab 3.1 says what gone may use, and it has no such function"):
        starter(FUNCTIONS, "it", {"3.1": {"gone": "`x`"}})
    with pytest.raises(LabError, match=r"it: twice has no docstring"):
        starter(FUNCTIONS, "it", {"3.1": {"twice": "`x`"}})


@pytest.mark.parametrize("number", ["3.1", "10.1"])
@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("# region lab {}: a\n", "the line '# region lab {}: a' before 'def f():'"),
        ("# endregion\n", "the line '# endregion' after the code of lab {}"),
    ],
    ids=["the first", "the last"],
)
def test_who_has_lost_a_marker_is_told_which_to_put_back_and_which_phase_to_reset(number, lost, told):
    ours = f"# region lab {number}: a\ndef f():\n    return 1\n# endregion\n"
    way_on = f"or `lab reset {number.partition('.')[0]}` starts the phase again"

    with pytest.raises(LabError, match=re.escape(f"put back {told.format(number)}, {way_on}")):
        splice(ours.replace(lost.format(number), ""), ours, (), "it")


def test_a_splice_keeps_some_regions_and_knows_every_lines_place():
    mine = starter(FUNCTIONS, "it").replace("# One at a time.", "# One at a time.\n    # And so on.")

    text, lines = splice(mine, FUNCTIONS, {"3.3"}, "it")

    assert unsolved(text) == ["3.3"]
    texts, originals = text.split("\n"), mine.split("\n")
    assert len(texts) == len(lines)
    assert lines == sorted(lines)
    for line in (
        "import torch",
        "    # And so on.",
        '    raise Todo("lab 3.3: more of it")',
        "    return found",
    ):
        assert originals[lines[texts.index(line)] - 1] == line


def test_code_is_moved_to_the_left():
    assert code_of(FUNCTIONS, "3.3", "it") == (
        "# One at a time.\nfor value in values:\n    total += value\n    found.append(total)\n\nreturn 7\n"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# region lab 3.1: a\nx = 1\n", "it:1: the region of lab 3.1 has no '# endregion'"),
        (
            "# region lab 3.1: a\n# region lab 3.2: b\n# endregion\n",
            "it:2: the region of lab 3.1 is still open",
        ),
        ("x = 1\n# endregion\n", "it:2: no region of a lab ends here"),
        ("# region lab 3: a\n# endregion\n", "it:1: write '# region lab N.M: title'"),
        ("# region lab 3.1: a\nx = 1\n# endregion\n", "lab 3.1 holds no function's code"),
        (
            "def f():\n    # region lab 3.1: a\n    # nothing\n    # endregion\n    pass\n",
            "holds no function's code",
        ),
        ("# region lab 3.1: a\ndef f(): return 1\n# endregion\n", "it:2: f has no body"),
    ],
)
def test_regions_that_cannot_be_stubbed_are_refused(text, problem):
    with pytest.raises(LabError, match=problem.replace("(", r"\(")):
        starter(text, "it")


def test_exercises_come_in_the_order_of_their_numbers(tmp_path):
    exercises = read_engine(
        engine(tmp_path, a=module("3.10", "3.2"), b=module("1.1"), c=module("3.3", "3.3"))
    )

    assert list(exercises) == ["1.1", "3.2", "3.3", "3.10"]
    assert [len(e.regions) for e in exercises.values()] == [1, 1, 2, 1]
    assert exercises["3.10"].module == "minivllm.a"


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ({"a": module("3.1", "4.1")}, "minivllm.a has regions of phases 3 and 4"),
        ({"a": module("3.1"), "b": module("3.1")}, "regions of lab 3.1 lie in minivllm.a and in minivllm.b"),
        ({"a": module("99.1")}, "there is no phase 99"),
    ],
)
def test_exercises_that_break_a_rule_are_refused(tmp_path, modules, problem):
    with pytest.raises(LabError, match=problem):
        read_engine(engine(tmp_path, **modules))


@pytest.fixture
def exercise(tmp_path):
    return read_engine(engine(tmp_path, a=FUNCTIONS))["3.3"]


def test_an_edit_changes_its_own_regions_only(exercise):
    text = edit(exercise, [("total += value", "total = value"), ("return 7\n", "return 8\n")])

    assert text == FUNCTIONS.replace("total += value", "total = value").replace("return 7", "return 8")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("total = a + b", "total = a - b", "0 times, not once"),  # of another exercise
        ("total", "sum", "2 times, not once"),
        ("", "x", "0 times, not once"),
        ("total += value", "total += (", "does not parse"),
        ("# One at a time.", "# Two.", "changes nothing but comments"),
    ],
)
def test_an_edit_that_is_none_is_refused(exercise, old, new, problem):
    with pytest.raises(LabError, match=problem):
        edit(exercise, [(old, new)])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("two = 2", "two = 3"),  # not the first of its line
        ("@one\n", "@two\n"),  # before the line where its function begins
    ],
)
def test_an_edit_may_change_what_does_not_begin_a_statements_lines(tmp_path, old, new):
    text = "# region lab 3.3: tried\none = 1; two = 2\n\n\n@one\ndef f(x):\n    return x\n# endregion\n"
    exercise = Exercise("3.3", "tried", text, find_regions(text, "tried"))

    assert edit(exercise, [(old, new)]) == text.replace(old, new)


ASYNC = """# region lab 9.1: later
async def one(x):
    return await x


async def several(x):
    \"\"\"Of them.\"\"\"
    async for y in x:
        yield y
# endregion
"""
ASYNC_TO_DO = """async def one(x):
    raise Todo("lab 9.1: later")


async def several(x):
    \"\"\"Of them.\"\"\"
    raise Todo("lab 9.1: later")
    yield
# endregion
"""


def test_a_stub_of_an_async_function_stays_what_it_was():
    """Whoever awaits it, or iterates over it, gets to the Todo."""
    assert starter(ASYNC, "a").endswith(ASYNC_TO_DO)
