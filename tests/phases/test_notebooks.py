"""Notebooks run, also cell by cell, and print what is committed, outside cells tagged `timing`."""

from pathlib import Path

import nbformat
import pytest

from tests.tools.notebooks import execute, execute_again, has_picture, text_of

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = [ROOT / "docs" / "economics.ipynb", *sorted(ROOT.glob("phases/*/walkthrough.ipynb"))]
# Each takes a process of its own, and most load the demo model, start many engines or compile kernels.
QUICK = "02_lora_layers"
SOME_NIGHTLY = [
    pytest.param(path, marks=() if path.parent.name == QUICK else pytest.mark.nightly) for path in NOTEBOOKS
]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.parent.name)
def test_every_code_cell_has_an_output_and_some_a_picture(path):
    cells = code_cells(nbformat.read(path, as_version=4))

    assert [cell.source for cell in cells if not cell.outputs] == []
    assert any(map(has_picture, cells))


@pytest.mark.parametrize("path", SOME_NIGHTLY, ids=lambda path: path.parent.name)
def test_a_fresh_run_gives_the_committed_outputs(path):
    committed = code_cells(nbformat.read(path, as_version=4))

    fresh = code_cells(execute(path))

    for before, now in zip(committed, fresh, strict=True):
        assert has_picture(now) == has_picture(before), before.source
        assert not any(output.get("name") == "stderr" for output in now.outputs), text_of(now)
        if "timing" not in before.metadata.get("tags", []):
            assert text_of(now) == text_of(before), before.source


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.parent.name)
def test_cells_can_be_run_again_after_others_and_from_the_top(path):
    assert execute_again(path) == []


@pytest.mark.nightly
def test_folding_can_be_tried_again_after_packing():
    """The cheap part of the above for the notebook where it was first found."""
    path = ROOT / "phases" / "01_request_and_weights" / "walkthrough.ipynb"

    assert execute_again(path, stop="## What is refused") == []
