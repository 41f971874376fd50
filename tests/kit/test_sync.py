"""`lab sync`: what it writes, and whose work it leaves alone."""

import json
from itertools import pairwise

import pytest

from labs.kit.regions import LabError, read_engine
from labs.kit.sync import sha256, sync

ENGINE = '''"""A module."""

import os


# region lab 3.2: shrink
def shrink():
    return {}


# endregion
'''
STARTER, MODULE = "labs/03_cpu_punica/ops.py", "minivllm/ops.py"
STARTERS, SOLUTION = "labs/starters.json", "solutions/03_cpu_punica/README.md"


@pytest.fixture
def checkout(tmp_path):
    """A small one, synchronised."""
    write(tmp_path, MODULE, ENGINE.format(1))
    write(tmp_path, SOLUTION, "# Three\n<!-- code: lab 3.2 -->\n<!-- /code -->\nWhy.\n")
    sync(tmp_path)
    return tmp_path


def write(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_starter_its_hash_and_the_code_of_a_solution_are_written(checkout):
    starter = (checkout / STARTER).read_text()

    assert 'raise Todo("lab 3.2: shrink")' in starter
    assert json.loads((checkout / STARTERS).read_text()) == {
        "03_cpu_punica/ops.py": {"module": "minivllm.ops", "sha256": sha256(starter)}
    }
    assert (checkout / SOLUTION).read_text() == (
        "# Three\n<!-- code: lab 3.2 -->\n```python\ndef shrink():\n    return 1\n```\n<!-- /code -->\nWhy.\n"
    )


def test_a_place_that_a_chapter_shows_is_where_the_exercise_begins(checkout):
    write(checkout, "phases/03_cpu_punica/README.md", "· 3.2 shrink  TODO labs/03_cpu_punica/old.py:99\n")

    sync(checkout)

    lines = (checkout / STARTER).read_text().split("\n")
    begins = lines.index("# region lab 3.2: shrink") + 1
    shown = (checkout / "phases/03_cpu_punica/README.md").read_text()
    assert shown == f"· 3.2 shrink  TODO {STARTER}:{begins}\n"


def test_a_chapter_that_shows_an_exercise_that_is_gone_is_refused(checkout):
    write(checkout, "phases/03_cpu_punica/README.md", "· 3.9 swim  TODO labs/03_cpu_punica/ops.py:5\n")

    with pytest.raises(LabError, match=r"^a chapter shows lab 3\.9, and there is none$"):
        sync(checkout)


OTHER_IMPORT = ENGINE.format(1).replace("import os", "import sys")
# What has changed -> the files, what is out of date by that, and what the starter has in the end; None: it is gone.
CHANGED = {
    "nothing": ({}, [], "import os"),
    "what is around an exercise": ({MODULE: OTHER_IMPORT}, [STARTER, STARTERS], "import sys"),
    "the code of an exercise": ({MODULE: ENGINE.format(2)}, [SOLUTION], "import os"),
    "a module has no exercise any more": ({MODULE: "", SOLUTION: ""}, [STARTER, STARTERS], None),
    "a starter is gone": ({STARTER: None}, [STARTER], "import os"),
    "a starter is a learner's work": ({STARTER: "solved"}, [], "solved"),
    "and the module is another": ({STARTER: "solved", MODULE: OTHER_IMPORT}, [STARTERS], "solved"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_out_of_date_is_named_by_looking_and_then_written_but_for_a_learners_work(checkout, what):
    files, stale, has = CHANGED[what]
    for name, text in files.items():
        if text is None:
            (checkout / name).unlink()
        else:
            write(checkout, name, text)
    before = files_of(checkout)

    looked, _ = sync(checkout, write=False)
    unchanged = files_of(checkout)
    written, left_alone = sync(checkout)

    assert (looked, unchanged, written) == (stale, before, stale)
    starter = files_of(checkout).get(STARTER)
    assert starter is None if has is None else has in starter
    work = [f"{STARTER} is not as it was generated: somebody's work, left as it is"]
    assert left_alone == (work if has == "solved" else [])
    assert sync(checkout)[0] == []


def files_of(root):
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.*")}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("<!-- code: lab 3.9 -->\n<!-- /code -->\n", "there is no lab 3.9"),
        ("<!-- code: lab 3.2 -->\n", "a block is not"),
        (
            "<!-- code: lab 3.2 -->\n<!-- code: lab 3.2 -->\n<!-- /code -->\n",
            "lab 3.2 has no '<!-- /code -->'",
        ),
        ("<!-- code: 3.2 -->\n<!-- /code -->\n", "a block is not"),
    ],
)
def test_code_blocks_that_cannot_be_filled_are_refused(checkout, document, problem):
    write(checkout, SOLUTION, document)

    with pytest.raises(LabError, match=f"^solutions/03_cpu_punica/README.md: .*{problem}"):
        sync(checkout)


def test_nothing_is_written_when_anything_is_wrong(checkout):
    write(checkout, MODULE, ENGINE.format(2))
    write(checkout, "solutions/04_triton_sgmv/README.md", "<!-- code: lab 3.9 -->\n<!-- /code -->\n")

    with pytest.raises(LabError):
        sync(checkout)

    assert "return 1" in (checkout / SOLUTION).read_text()


def test_no_comment_of_an_answer_is_left_above_a_stub():
    """What a comment above the first statement says is about a body that a stub has replaced."""
    starters = {exercise.module: exercise.fresh for exercise in read_engine().values()}
    found = [
        f"{module}: {above.strip()}"
        for module, text in starters.items()
        for above, line in pairwise(text.split("\n"))
        if line.strip().startswith("raise Todo(") and above.strip().startswith("#")
    ]

    assert found == []
