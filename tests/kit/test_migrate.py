"""`lab migrate`: answers from starters of an earlier release go where their exercises are now, and none is lost."""

import ast
import json
import subprocess
from pathlib import Path

import pytest
from checkout import Checkout

from labs.kit.migrate import migrate, record_release, strays, unreleased
from labs.kit.regions import code_of, read_engine, splice, starter
from labs.kit.sync import sync

# The release: two exercises in a class, one in a module that stays.
SLOTS = '''"""Slots."""

import os


class Slots:
    """Of a layer."""

    # region lab 3.1: write a slot
    def write(self, index: int, rows: list) -> None:
        """Put rows into a slot."""
        self.rows[index] = rows

    # endregion

    # region lab 3.2: clear a slot
    @property
    def empty(self) -> list:
        # What is no slot is none of them.
        return [row for row in self.rows if not row]

    def clear(self, index: int) -> None:
        """Empty a slot."""
        self.rows[index] = []

    # endregion
'''
OPS = '''"""Arithmetic."""

import os


# region lab 3.3: shrink
def shrink(x: "Old"):
    """Products."""
    return x


# endregion
'''
# Today: 3.1 is gone, 3.2 lives elsewhere, 3.3 stands in another frame.
CLEARING = '''"""Clearing alone."""

import os


# region lab 3.2: clear a slot
class Clearing:
    @property
    def empty(self) -> "list[int]":
        return []

    def clear(self, index: "Index") -> None:
        """Empty one slot of S."""
        self.rows[index] = None


# endregion
'''
OPS_NOW = OPS.replace('"""Arithmetic."""\n', '"""Arithmetic, by run."""\n\nimport sys\n').replace(
    '"Old"', '"New"'
)

OLD, NEW, STAYS = (f"labs/03_cpu_punica/{name}.py" for name in ("slots", "clearing", "ops"))
KEPT = "labs/03_cpu_punica/old/slots.py"
STUB = 'raise Todo("lab 3.{}: {}")'
WRITE, CLEAR, SHRINK = (
    STUB.format(1, "write a slot"),
    STUB.format(2, "clear a slot"),
    STUB.format(3, "shrink"),
)


class Lab:
    """A learner's checkout: `answer` before an `update`, `migrate` after it."""

    def __init__(self, root):
        self.root = root
        self.write("minivllm/slots.py", SLOTS)
        self.write("minivllm/ops.py", OPS)
        sync(root)
        record_release(root)

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def read(self, name):
        return (self.root / name).read_text()

    def answer(self, name, *edits):
        text = self.read(name)
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        self.write(name, text)

    def update(self, clearing=CLEARING, ops=OPS_NOW):
        """What git does: files of ours follow, files that a learner has changed stay."""
        (self.root / "minivllm/slots.py").unlink()
        self.write("minivllm/clearing.py", clearing)
        self.write("minivllm/ops.py", ops)
        sync(self.root)

    def files(self):
        return {str(p.relative_to(self.root)): p.read_text() for p in (self.root / "labs").rglob("*.*")}


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


ANSWER = (CLEAR, "self.rows[index] = []  # mine")


def test_an_answer_goes_where_its_exercise_is_now_under_todays_signature(lab):
    lab.answer(OLD, ANSWER)
    old = lab.read(OLD)
    lab.update()
    assert strays(lab.root) == [lab.root / OLD]

    said = migrate(lab.root)

    comment, body = "# What is no slot is none of them.", "self.rows[index] = []  # mine"
    answered = (
        starter(CLEARING, "clearing").replace(CLEAR, f"{comment}\n        {body}", 1).replace(CLEAR, body)
    )
    assert lab.read(NEW) == answered
    assert not (lab.root / OLD).exists()
    assert lab.read(KEPT) == f"# lab migrate: lab 3.2 is carried to {NEW}\n{old}"
    assert said == [f"{OLD}: lab 3.2 is carried to {NEW}", f"{OLD} is kept as {KEPT}"]
    assert strays(lab.root) == []


@pytest.mark.parametrize("name", [OLD, STAYS], ids=["of a module that is gone", "of one that stays"])
def test_an_old_starter_that_nobody_touched_is_replaced(lab, name):
    untouched = lab.read(name)
    lab.update()
    files = lab.files()
    lab.write(name, untouched)

    said = migrate(lab.root)

    assert said == ([f"{OLD} is removed: nobody had written in it"] if name == OLD else [])
    assert lab.files() == files


ELSEWHERE = CLEARING.replace("index:", "slot:")
MORE = CLEARING.replace("# endregion", "    def count(self):\n        return 0\n\n\n# endregion")
# What was written into the old file, what its exercise is today; what is said, and what today's file has.
LEFT_BEHIND = {
    "its exercise is gone": (
        (WRITE, "self.rows[index] = rows"),
        CLEARING,
        "lab 3.1 was not carried: there is no such exercise any more",
        CLEAR,
    ),
    "its arguments are others": (
        ANSWER,
        ELSEWHERE,
        "lab 3.2 was not carried: clear takes other arguments now",
        CLEAR,
    ),
    "a function is new": (ANSWER, MORE, "lab 3.2 was not carried: count is not in it now", CLEAR),
    "it does not parse": (
        (CLEAR, "self.rows[index] = ["),
        CLEARING,
        "lab 3.2 was not carried: it does not parse, invalid syntax",
        CLEAR,
    ),
    "it is outside the regions": (
        ("import os", "import math"),
        CLEARING,
        "it has changes outside its regions",
        CLEAR,
    ),
}


@pytest.mark.parametrize("why", LEFT_BEHIND)
def test_what_cannot_be_carried_is_kept_with_the_reason_and_the_other_answers_are_carried(lab, why):
    written, clearing, reason, left = LEFT_BEHIND[why]
    lab.answer(OLD, written)
    lab.answer(STAYS, (SHRINK, "return 2 * x"))
    lab.update(clearing=clearing)

    said = migrate(lab.root)

    assert f"{OLD}: {reason}" in said
    assert lab.read(KEPT).startswith(f"# lab migrate: {reason}\n") and written[1] in lab.read(KEPT)
    assert left in lab.read(NEW)
    assert "return 2 * x" in lab.read(STAYS)
    files = lab.files()
    assert (migrate(lab.root), lab.files()) == ([], files), "a second time nothing changes"


def test_an_answer_that_is_there_already_stays(lab):
    lab.answer(OLD, ANSWER)
    lab.update()
    lab.answer(NEW, (CLEAR, "return 'newer'"))
    newer = lab.read(NEW)

    said = migrate(lab.root)

    assert lab.read(NEW) == newer
    assert f"{OLD}: lab 3.2 was not carried: {NEW} holds an answer of yours already" in said
    assert "# mine" in lab.read(KEPT)


BOTH_SIDES = f"<<<<<<< HEAD\n    return 2\n=======\n    {SHRINK}\n>>>>>>> theirs"


@pytest.mark.parametrize(
    ("name", "edit", "sentence"),
    [
        (OLD, ("    # endregion\n", ""), f"{OLD}:16: the region of lab 3.1 is still open here"),
        (STAYS, (SHRINK, BOTH_SIDES), f"{STAYS} holds both sides of a merge that git could not finish"),
    ],
    ids=["a marker is gone", "a merge is not finished"],
)
def test_a_file_that_cannot_be_read_waits_until_it_is_put_right(lab, name, edit, sentence):
    lab.answer(name, edit)
    lab.update()
    files = lab.files()

    said = migrate(lab.root)

    assert said == [f"{sentence}; put it right, then run `lab migrate` again"]
    assert lab.files() == files


def test_what_stands_beside_the_functions_of_a_region_goes_with_them(lab):
    body = "# once\n    return math.sqrt(_doubled(x))\n    # at last"
    helper = "def _doubled(row):\n    return 2 * row\n"
    lab.answer(STAYS, (SHRINK, body), ("def shrink", f"import math\n\n\n{helper}\n\ndef shrink"))
    lab.update()

    migrate(lab.root)

    answered = starter(OPS_NOW, "ops").replace(SHRINK, body)
    assert lab.read(STAYS) == answered.replace("def shrink", f"import math\n\n{helper}\ndef shrink")


@pytest.mark.parametrize(
    ("written", "carried"),
    [
        ("return 2 * x", "return 2 * x"),
        ("return _twice(x) + x._twice_as_wide", "return twice(x) + x._twice_as_wide"),
        ("return self._table[x] + self._tables", "return self.tiers.table[x] + self._tables"),
    ],
    ids=["nothing else", "a name that is another now", "what has moved into another object"],
)
def test_an_answer_in_an_old_version_of_its_file_gets_todays_and_todays_names(
    lab, monkeypatch, written, carried
):
    """What has moved is looked for in the answers of that exercise alone: none of 3.2 has an x."""
    monkeypatch.setattr("labs.kit.migrate.RENAMED", {"_twice": "twice"})
    moved = {"3.3": {r"self\._table\b": "self.tiers.table"}, "3.2": {r"\bx\b": "y"}}
    monkeypatch.setattr("labs.kit.migrate.MOVED", moved)
    lab.answer(STAYS, (SHRINK, written))
    lab.update()
    assert strays(lab.root) == [lab.root / STAYS]

    migrate(lab.root)

    assert lab.read(STAYS) == starter(OPS_NOW, "ops").replace(SHRINK, carried)
    assert strays(lab.root) == []


@pytest.mark.parametrize("is_left", [True, False], ids=["both are there", "one is gone"])
def test_of_two_methods_with_one_name_each_gets_its_own_body_and_the_one_that_is_left_the_firsts(
    lab, is_left
):
    second = "class Packed:\n    def shrink(x):\n        return [x]\n\n\n# endregion"
    first, other = "return 2 * x", "return [2 * one for one in x]"
    lab.write("minivllm/ops.py", OPS.replace("# endregion", second))
    sync(lab.root)
    record_release(lab.root)
    lab.answer(STAYS, (f"    {SHRINK}\n\n\nclass", f"    {first}\n\n\nclass"))
    if is_left:
        lab.answer(STAYS, (f"        {SHRINK}", f"        {other}"))
    today = OPS_NOW.replace("# endregion", second) if is_left else OPS_NOW
    lab.update(ops=today)

    migrate(lab.root)

    assert lab.read(STAYS) == starter(today, "ops").replace(SHRINK, first, 1).replace(SHRINK, other, 1)


def test_todays_starters_are_left_to_their_learner(lab):
    lab.update()
    lab.answer(STAYS, (SHRINK, "return 2 * x"), ("import sys", "import math"))
    lab.answer(NEW, ANSWER)
    lab.write("labs/03_cpu_punica/scratch.py", "x = 1\n")
    files = lab.files()

    said = migrate(lab.root)

    assert said == [f"{STAYS} has changes outside its regions: it is left as it is"]
    assert lab.files() == files


def test_no_kept_file_takes_the_place_of_another(lab):
    lab.write(KEPT, "from before")
    lab.answer(OLD, ANSWER)
    lab.update()

    migrate(lab.root)

    assert lab.read(KEPT) == "from before"
    assert "# mine" in lab.read(KEPT.replace("slots", "slots-2"))


def test_every_command_says_that_exercises_have_moved(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.solve("3.1")
    solved, here = checkout.file("3.1"), checkout.file("3.1").relative_to(tmp_path)
    answer = solved.read_text()
    there = solved.rename(solved.with_name("before.py")).relative_to(tmp_path)
    sync(tmp_path)

    before = checkout.lab("hint", "3.1").stderr
    migrated = checkout.lab("migrate")
    again = checkout.lab("migrate")

    assert before == f"{there}: exercises have moved; run `lab migrate`\n"
    assert f"{there}: lab 3.1 is carried to {here}\n" in migrated.stdout
    assert solved.read_text() == answer
    assert (again.stdout, again.stderr) == ("every exercise is where it belongs\n", "")


def test_starters_that_no_release_has_are_named_until_one_has_them(lab):
    before = unreleased(lab.root)
    lab.write("minivllm/ops.py", OPS_NOW)
    sync(lab.root)

    after = unreleased(lab.root)

    assert (before, after) == ([], [STAYS])
    record_release(lab.root)
    assert unreleased(lab.root) == []


# ---- from the release e9fad465, whose engine imported the overlay from minivllm.labs -------------------------

# `start` has five of its starters, `solved` the same with one exercise each answered, in five phases.
RELEASE = Path(__file__).parent / "release_e9fad465"
SOLVED = {
    "1.5": "01_request_and_weights/lora_weights",  # its recipe was the engine's
    "2.6": "02_lora_layers/accepting",  # now in base.py
    "3.6": "03_cpu_punica/runs_backend",
    "6.2": "06_max_loras_scheduler/step_policy",  # now in scheduler.py
    "11.1": "11_many_gpus/adapter_share",  # of a module in another folder
}
HUNT, NOTEBOOK = "labs/08_incidents/test_16_base_waits.py", "notebooks/06_max_loras_scheduler.ipynb"


def release(which):
    """labs/NN_name/FILE.py -> its text in the release."""
    return {f"labs/{name}.py": (RELEASE / which / f"{name}.txt").read_text() for name in SOLVED.values()}


def merged_by_git(folder, today):
    """What `git pull -X ours` leaves of today's starters where five of the release's were answered.

    today   file -> text, of all starters
    """

    def git(*command):
        who = ["-c", "user.name=learner", "-c", "user.email=learner@localhost"]
        return subprocess.run(["git", *who, *command], cwd=folder, capture_output=True, text=True)

    def commit(files):
        for path in folder.glob("labs/*/*.py"):
            path.unlink()
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        git("add", "--all")
        assert git("commit", "--quiet", "--message", "files").returncode == 0

    folder.mkdir()
    git("init", "--quiet", "--initial-branch", "mine")
    commit(release("start"))
    git("branch", "ours")
    commit(release("solved"))
    git("checkout", "--quiet", "ours")
    commit(today)
    git("checkout", "--quiet", "mine")
    git("merge", "-X", "ours", "--message", "update", "ours")
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.glob("labs/*/*.py")}


def bodies(code):
    """Statements of an exercise's functions, without their docstrings."""
    found = []
    for function in ast.walk(ast.parse(code)):
        if isinstance(function, ast.FunctionDef):
            is_documented = ast.get_docstring(function) is not None
            found.append((function.name, [ast.unparse(line) for line in function.body[is_documented:]]))
    return found


@pytest.mark.parametrize("update", ["git's merge", "the files of before"])
def test_five_answers_of_a_release_are_carried_into_todays_starters(tmp_path, update):
    checkout, exercises = Checkout(tmp_path / "checkout"), read_engine()
    today = {
        p.relative_to(checkout.root).as_posix(): p.read_text() for p in checkout.root.glob("labs/[01]*/*.py")
    }
    files = merged_by_git(tmp_path / "merged", today) if "git" in update else release("solved")
    for name, text in files.items():
        (checkout.root / name).write_text(text)

    said = checkout.lab("migrate")

    assert said.returncode == 0 and "not carried" not in said.stdout, said.stdout
    for number, name in SOLVED.items():
        carried = code_of(checkout.file(number).read_text(), number, name)
        answer = code_of(release("solved")[f"labs/{name}.py"], number, name)
        answer = answer.replace("self.may_run(", "self.why_wait(")  # what 6.2 asks has that name now
        assert bodies(carried) == bodies(answer), number
        # Around it the file is today's: with our code in its regions it is the engine's module.
        ours, _ = splice(checkout.file(number).read_text(), exercises[number].text, (), name)
        assert without_todo(ours) == without_todo(exercises[number].text), number
    assert strays(checkout.root) == []


def without_todo(text):
    tree = ast.parse(text)
    tree.body = [line for line in tree.body if ast.unparse(line) != "from labs.kit.overlay import Todo"]
    return ast.dump(tree)


def test_tests_of_hunts_and_copies_of_notebooks_get_todays_imports(tmp_path):
    checkout = Checkout(tmp_path)
    hunt, notebook = checkout.root / HUNT, checkout.root / NOTEBOOK
    hunt.write_text("from minivllm.labs import Todo\n\n\ndef test_mine(world):\n    assert world\n")
    notebook.parent.mkdir(exist_ok=True)
    cell = {"source": ["from minivllm.labs import ROOT\n", "from minivllm.core.prefix_cache import Hash\n"]}
    notebook.write_text(json.dumps({"cells": [cell]}))

    said = checkout.lab("migrate").stdout.splitlines()

    assert hunt.read_text().startswith("from labs.kit.overlay import Todo\n")
    assert "from labs.kit.regions import ROOT\\n" in notebook.read_text()
    assert f"{HUNT}: what it imports from minivllm.labs is in labs.kit now" in said
    [gone] = [line for line in said if "prefix_cache" in line]
    assert gone.startswith(
        f"{NOTEBOOK}: minivllm.core.prefix_cache, which it imports, is not there any more; "
    )
    assert "`lab notebook 6 --fresh`" in gone
