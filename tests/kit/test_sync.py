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
STARTER = "labs/03_cpu_punica/ops.py"


@pytest.fixture
def checkout(tmp_path):
    """A small one, synchronised."""
    write(tmp_path, "minivllm/ops.py", ENGINE.format(1))
    write(
        tmp_path,
        "solutions/03_cpu_punica/README.md",
        "# Three\n<!-- code: lab 3.2 -->\n<!-- /code -->\nWhy.\n",
    )
    sync(tmp_path)
    return tmp_path


def write(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_starter_its_hash_and_the_code_of_a_solution_are_written(checkout):
    starter = (checkout / STARTER).read_text()

    assert 'raise Todo("lab 3.2: shrink")' in starter
    assert json.loads((checkout / "labs/starters.json").read_text()) == {
        "03_cpu_punica/ops.py": {"module": "minivllm.ops", "sha256": sha256(starter)}
    }
    assert (checkout / "solutions/03_cpu_punica/README.md").read_text() == (
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


def test_a_second_time_there_is_nothing_to_do(checkout):
    assert sync(checkout) == ([], [])


def test_a_starter_follows_the_engine(checkout):
    write(checkout, "minivllm/ops.py", ENGINE.format(1).replace("import os", "import sys"))

    stale, left_alone = sync(checkout)

    assert (stale, left_alone) == ([STARTER, "labs/starters.json"], [])
    assert "import sys" in (checkout / STARTER).read_text()


def test_looking_writes_nothing(checkout):
    write(checkout, "minivllm/ops.py", ENGINE.format(2))

    stale, _ = sync(checkout, write=False)

    assert stale == ["solutions/03_cpu_punica/README.md"]
    assert "return 1" in (checkout / stale[0]).read_text()


def test_a_learners_work_is_never_overwritten(checkout):
    mine = (checkout / STARTER).read_text().replace('raise Todo("lab 3.2: shrink")', "return 3")
    write(checkout, STARTER, mine)
    write(checkout, "minivllm/ops.py", ENGINE.format(1).replace("import os", "import sys"))

    stale, left_alone = sync(checkout)

    assert stale == ["labs/starters.json"]
    assert left_alone == [f"{STARTER} is not as it was generated: somebody's work, left as it is"]
    assert (checkout / STARTER).read_text() == mine


def test_a_learners_work_is_nothing_out_of_date(checkout):
    write(checkout, STARTER, "solved")

    assert sync(checkout, write=False)[0] == []


def test_a_starter_that_was_deleted_comes_back(checkout):
    (checkout / STARTER).unlink()

    assert sync(checkout)[0] == [STARTER]


def test_the_starter_of_a_module_without_regions_goes(checkout):
    write(checkout, "minivllm/ops.py", "")
    write(checkout, "solutions/03_cpu_punica/README.md", "")

    assert sync(checkout)[0] == [STARTER, "labs/starters.json"]
    assert not (checkout / STARTER).exists()


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
    write(checkout, "solutions/03_cpu_punica/README.md", document)

    with pytest.raises(LabError, match=f"^solutions/03_cpu_punica/README.md: .*{problem}"):
        sync(checkout)


def test_nothing_is_written_when_anything_is_wrong(checkout):
    write(checkout, "minivllm/ops.py", ENGINE.format(2))
    write(checkout, "solutions/04_triton_sgmv/README.md", "<!-- code: lab 3.9 -->\n<!-- /code -->\n")

    with pytest.raises(LabError):
        sync(checkout)

    assert "return 1" in (checkout / "solutions/03_cpu_punica/README.md").read_text()


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
