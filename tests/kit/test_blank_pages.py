"""Exercises that start from a blank page: the starter keeps a name, and a contract says the rest."""

import ast

import pytest
from checkout import Checkout

from labs.kit.api import contract
from labs.kit.migrate import transplant
from labs.kit.regions import LabError, code_of, definitions_in, find_regions, read_engine, starter
from labs.kit.variants import designs_of, with_variant

EXERCISES = read_engine()
BLANK = [number for number, exercise in EXERCISES.items() if exercise.is_blank]
SECTIONS = ("What the ", "What must hold", "Two examples, by hand", "What you may use")

CLASS = '''"""Rooms."""

import os


# region lab 3.1: who is in
class Rooms:
    """A docstring that tells too much."""

    def __init__(self, size: int) -> None:
        self.guests = []

    def enter(self, name: str) -> None:
        """Another one."""
        self.guests.append(name)


# endregion


class Hotel:
    # region lab 3.2: the bill
    @property
    def bill(self) -> int:
        """What it costs."""
        return 2

    # endregion
'''


def page(text, number):
    return code_of(text, number, "rooms")


SAYS = "# A blank page. What it promises: `lab api {0}`, or labs/03_cpu_punica/contracts/{0}.md\n"
OF_A_CLASS = """class Rooms:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise Todo("lab 3.1: who is in")
"""
OF_A_FUNCTION = """@property
def bill(self) -> int:
    raise Todo("lab 3.2: the bill")
"""


def test_of_a_class_its_name_is_left_and_of_a_function_its_signature_where_the_page_is_blank():
    both, first = starter(CLASS, "rooms", blanks={"3.1", "3.2"}), starter(CLASS, "rooms", blanks={"3.1"})
    plain = starter(CLASS, "rooms")

    assert page(both, "3.1") == page(first, "3.1") == SAYS.format("3.1") + OF_A_CLASS
    assert page(both, "3.2") == SAYS.format("3.2") + OF_A_FUNCTION
    assert page(first, "3.2") == page(plain, "3.2")
    assert '"""Another one."""' in page(plain, "3.1")
    assert [region.exercise for region in find_regions(both, "rooms")] == ["3.1", "3.2"]


def test_a_page_with_two_names_is_refused():
    two = CLASS.replace(
        "# endregion\n\n\nclass Hotel", "def other():\n    return 1\n\n\n# endregion\n\n\nclass Hotel"
    )

    with pytest.raises(LabError, match=r"a blank page has one class or function, lab 3\.1 has 2"):
        starter(two, "rooms", blanks={"3.1"})


@pytest.mark.parametrize("number", BLANK)
def test_a_starter_keeps_no_word_of_ours_but_the_name(number):
    exercise = EXERCISES[number]

    written = ast.parse(page(exercise.fresh, number))
    (called,) = written.body
    said = [line for line in page(exercise.fresh, number).splitlines() if line.strip().startswith("#")]

    assert said == [f"# A blank page. What it promises: `lab api {number}`, or {place(exercise)}"]
    assert ast.get_docstring(called) is None
    assert "raise Todo(" in ast.unparse(called) and len(ast.unparse(called).splitlines()) <= 4


def place(exercise):
    return f"labs/{exercise.phase}/contracts/{exercise.number}.md"


@pytest.mark.parametrize("number", BLANK)
def test_a_contract_says_what_to_promise_and_names_all_that_is_called(number):
    exercise = EXERCISES[number]
    text = contract(exercise)
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]

    assert len(headings) == len(SECTIONS)
    assert all(heading.startswith(begin) for heading, begin in zip(headings, SECTIONS))
    [region] = [r for r in find_regions(exercise.text, exercise.module) if r.exercise == number]
    (called,) = definitions_in(ast.parse(exercise.text), region)
    methods = [node.name for node in called.body if isinstance(node, ast.FunctionDef)] or []
    for name in {called.name, *methods} - {"__init__"}:
        assert f"{name}(" in text, f"the contract of {number} does not say {name}"


@pytest.mark.parametrize("number", BLANK)
def test_answers_of_two_other_designs_are_there(number):
    exercise = EXERCISES[number]
    designs = designs_of(exercise)

    assert len(designs) >= 2
    made = {with_variant(exercise, code=code) for code in (None, *designs.values())}
    assert len(made) == 1 + len(designs)


def test_lab_api_begins_with_the_contract(tmp_path):
    result = Checkout(tmp_path).lab("api", "6.1")

    assert result.stdout.startswith("lab 6.1: whose adapters hold a slot\n# Contract of lab 6.1")
    assert result.stdout.index("Two examples, by hand") < result.stdout.index("minivllm.core.lora_admission")


# ---- answers from starters that told more ---------------------------------------------------------------------

OLD_SLOTS = """
def begin_step(self, running, pinned):
    self.pinned = set(pinned)
    self.num_running = Counter(a for a in running if a)
    self.taken = self.pinned | set(self.num_running)

def fits(self, adapter_id):
    return adapter_id == 0 or adapter_id in self.taken or len(self.taken) < self.max_loras

def take(self, adapter_id):
    if adapter_id:
        self.taken.add(adapter_id)

def never_fits(self, adapter_id):
    return adapter_id not in self.pinned | {0} and len(self.pinned) >= self.max_loras
"""


def test_four_functions_of_before_become_a_class_that_keeps_the_contract():
    exercise = EXERCISES["6.1"]
    names = {}

    exec(transplant(OLD_SLOTS, exercise.fresh, "6.1", is_blank=True), names)

    slots = names["LoRASlots"](2)
    slots.begin_step([3, 3, 0], [])
    slots.take(4)
    assert (slots.holders(), slots.evictable(), slots.fits(5)) == ({3, 4}, {3: 2}, False)
    slots.lose(3)
    assert (slots.holders(), slots.evictable(), slots.fits(5)) == ({4}, {}, True)


@pytest.mark.parametrize("number", ["5.2", "7.4"])
def test_a_method_of_before_is_carried_with_its_helpers(number):
    exercise = EXERCISES[number]
    [code] = [
        c for what, c in designs_of(exercise).items() if "two methods" in what or "three stages" in what
    ]

    carried = transplant(code, exercise.fresh, number, is_blank=True)

    assert page(carried, number) == code.strip("\n") + "\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def _step(self):\n    return 1\n", "_step takes other arguments now"),
        ("def step(self, outputs):\n    return 1\n", "_step is not in it now"),
        ("class _step:\n    pass\n", "_step is not in it now"),
        ("def _step(self, outputs):\n    return (\n", "it does not parse"),
    ],
)
def test_what_does_not_fit_a_page_is_not_carried(code, said):
    with pytest.raises(LabError, match=said):
        transplant(code, EXERCISES["7.4"].fresh, "7.4", is_blank=True)
