"""Notebooks run, also cell by cell, and print what is committed, outside cells tagged `timing`."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.tools.nights import of_night
from tests.tools.notebooks import execute, execute_again, has_picture, text_of

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = [ROOT / "docs" / "economics.ipynb", *sorted(ROOT.glob("phases/*/walkthrough.ipynb"))]
# Each takes a process of its own, and most load the demo model, start many engines or compile kernels.
QUICK = ROOT / "phases" / "02_lora_layers" / "walkthrough.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def of_notebooks(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.parent.name)


@of_notebooks(NOTEBOOKS)
def test_every_code_cell_has_an_output_and_some_a_picture_which_none_draws_by_itself(path):
    cells = code_cells(nbformat.read(path, as_version=4))

    assert [cell.source for cell in cells if not cell.outputs] == []
    assert any(map(has_picture, cells))
    assert [cell.source for cell in cells if re.search(r"matplotlib|\bplt\.|\.imshow\(", cell.source)] == []


@of_notebooks(NOTEBOOKS[1:11])
def test_readers_write_twice_and_are_told_right_after_what_is_missing(path):
    cells = nbformat.read(path, as_version=4).cells
    turns = [
        at for at, cell in enumerate(cells) if cell.cell_type == "markdown" and "Your turn" in cell.source
    ]

    assert len(turns) >= 2
    for at in turns:
        written, checked = (cell for cell in cells[at + 1 : at + 4] if cell.cell_type == "code")
        assert re.search(r"^(def|class) |^BODY = ", written.source, re.MULTILINE)
        said = text_of(written) + text_of(checked)
        assert re.search(r"Yours (differs in|is too|is .* behind)|your test passes on the broken", said), said


def assert_as_committed(path, notebook):
    committed = code_cells(nbformat.read(path, as_version=4))
    for before, now in zip(committed, code_cells(notebook), strict=True):
        assert has_picture(now) == has_picture(before), before.source
        assert not any(output.get("name") == "stderr" for output in now.outputs), text_of(now)
        if "timing" not in before.metadata.get("tags", []):
            assert text_of(now) == text_of(before), before.source


def test_a_fresh_run_gives_the_committed_outputs():
    assert_as_committed(QUICK, execute(QUICK))


# A reader's next runs take three times as long as the first, so they are a sixth's every night.
AGAIN = of_night(NOTEBOOKS, 6)


@pytest.mark.nightly
@of_notebooks([path for path in NOTEBOOKS if path not in AGAIN])
def test_so_it_does_for_all(path):
    assert_as_committed(path, execute(path))


@pytest.mark.nightly
@of_notebooks(AGAIN)
def test_cells_can_be_run_again_after_others_and_from_the_top(path):
    fresh, wrong = execute_again(path)

    assert_as_committed(path, fresh)
    assert wrong == []
