"""What a learner broke outside the exercises of a file is told where it is, and put back without their answers."""

import ast
import re

import pytest
from checkout import Checkout

from labs.kit import surroundings
from labs.kit.regions import read_engine

SLOTS, BASE = "2.1", "2.6"  # in whose files functions stand that are part of no exercise
# What is broken -> the exercise, the text and what takes its place, what is told to differ; None: that it is gone.
LAYER, IMPORTED = "BaseLayerWithLoRA", "from minivllm.lora.lora_weights import PackedLoRALayerWeights"
BROKEN = {
    "a function's body": (
        SLOTS,
        "            mine.copy_(its)",
        "            its.copy_(mine)",
        "Slots.take_over",
    ),
    "a signature": (BASE, "def part_shape(self, part: int)", "def part_shape(self)", f"{LAYER}.part_shape"),
    "the base of a class": (BASE, f"class {LAYER}(nn.Module):", f"class {LAYER}:", LAYER),
    "a value": (BASE, "    share: Share = EVERYTHING\n", "    share: Share = None\n", f"{LAYER}.share"),
    "an import": (BASE, "from itertools import cycle\n", "", "from itertools import cycle"),
    "one name of several": (BASE, ", PackedLoRALayerWeights\n", "\n", IMPORTED),
    "a method": (BASE, re.compile(r"    def part_shape.*?\n\n", re.DOTALL), "", f"{LAYER}.part_shape"),
}
ADDED = {
    "a helper": ("class BaseLayerWithLoRA", "def helper(x):\n    return x\n\n\nclass BaseLayerWithLoRA"),
    "a method": ("    share: Share", "    def helper(self):\n        return 1\n\n    share: Share"),
    "an import": ("import torch\n", "import math\nimport torch\nfrom itertools import chain, cycle\n"),
    "no use for `Todo` any more": ("from labs.kit.overlay import Todo\n", ""),
    "another comment": ("# of a layer, one entry a slice", "# mine"),
    "another docstring": (
        '"""How wide the A of a part must be, and how tall its B."""',
        '"""Said otherwise."""',
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("surroundings"))


@pytest.fixture
def checkout(shared, monkeypatch):
    shared.forget()
    here = {exercise.starter: shared.file(number) for number, exercise in read_engine().items()}
    monkeypatch.setattr(surroundings, "read", lambda path: here[path].read_text())
    return shared


def broken(checkout, name):
    """The exercise, the name that is told, and the text to find in the line that is told, once the file is broken."""
    number, old, new, told = BROKEN[name]
    path = checkout.file(number)
    text = path.read_text()
    changed = old.sub(new, text, count=1) if isinstance(old, re.Pattern) else text.replace(old, new)
    assert changed != text
    path.write_text(changed)
    return number, told, new.strip()


@pytest.mark.parametrize("name", BROKEN)
def test_what_was_broken_is_named_with_its_line_and_put_back_as_the_starter_has_it(checkout, name):
    checkout.solve("2.1", "2.6")
    exercise = read_engine()[BROKEN[name][0]]
    sound = checkout.file(exercise.number).read_text()

    number, told, line = broken(checkout, name)
    said = surroundings.complaint(exercise)
    mended = surroundings._mended(exercise.text, surroundings._with_our_answers(exercise)[0])

    how = f"is changed at line {checkout.place(number, line).rpartition(':')[2]}" if line else "is gone"
    assert f"outside the exercises: `{told}` {how}; `lab reset {number} --outside`" in said
    again, _ = surroundings.splice(mended, sound, (), "")
    assert ast.dump(ast.parse(in_one_order(again))) == ast.dump(ast.parse(in_one_order(sound)))


def in_one_order(text):
    """With the names that are imported in one order, one a line: a name is put back by an import of its own."""
    tree = ast.parse(text)
    imports = sorted(name for name in surroundings._named(tree) if name.startswith(("import", "from")))
    rest = [ast.unparse(n) for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom)]
    return "\n".join(imports + rest)


@pytest.mark.parametrize("name", ADDED)
def test_what_a_learner_adds_is_no_difference(checkout, name):
    old, new = ADDED[name]
    path = checkout.file(BASE)
    text = path.read_text()
    assert text.count(old) == 1
    checkout.solve(BASE)
    path.write_text(path.read_text().replace(old, new))

    assert surroundings.complaint(read_engine()[BASE]) is None


def test_nothing_is_said_of_starters_nor_of_answers(checkout):
    one_a_file = {exercise.starter: exercise for exercise in read_engine().values()}.values()
    untouched = {surroundings.complaint(exercise) for exercise in one_a_file}
    checkout.solve()

    solved = {surroundings.complaint(exercise) for exercise in one_a_file}

    assert (untouched, solved) == ({None}, {None})


def test_of_many_differences_the_first_are_named(checkout):
    path = checkout.file(BASE)
    path.write_text(re.sub(r"^(import|from (?!labs)).*\n", "", path.read_text(), flags=re.MULTILINE))

    said = surroundings.complaint(read_engine()[BASE])

    assert said.count(" is gone") == surroundings.MOST
    assert re.search(r", \d+ more; `lab reset", said)


def test_a_check_that_passes_tells_of_them_and_a_reset_keeps_answers_and_helpers(checkout):
    checkout.solve("2.1", "2.2")
    path = checkout.file(SLOTS)
    path.write_text(
        path.read_text().replace("\nclass Slots", "\ndef helper():\n    return 1\n\n\nclass Slots")
    )
    sound = path.read_text()
    number, told, _ = broken(checkout, "a function's body")
    was = path.read_text()

    checked = checkout.lab("check", number)
    refused = checkout.lab("reset", number, "--outside", stdin="n\n")
    unchanged = path.read_text()
    put_back = checkout.lab("reset", number, "--outside", "--yes").stdout
    mended, again = path.read_text(), checkout.lab("reset", number, "--outside", "--yes").stdout

    assert "✓ 2.1" in checked.stdout
    assert f"outside the exercises: `{told}` is changed at line " in checked.stdout
    assert (refused.returncode, unchanged) == (1, was)
    assert mended == sound
    assert (checkout.root / put_back.strip().removeprefix("kept: ")).read_text() == was
    assert again == "labs/02_lora_layers/slots.py is as it was there\n"
    assert surroundings.complaint(read_engine()[number]) is None


def test_surroundings_that_python_cannot_read_are_put_back_whole(checkout):
    checkout.solve(SLOTS)
    path = checkout.file(SLOTS)
    sound = path.read_text()
    path.write_text(sound.replace("def take_over(", "def take_over(("))

    said = checkout.lab("reset", SLOTS, "--outside", "--yes").stdout

    assert said.startswith("kept: ")
    assert path.read_text() == sound
