"""Pictures and comparisons of notebooks: what is drawn is what was given, and a wrong answer is not called right."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from labs.kit import plots
from labs.kit.predict import compare

matplotlib.use("Agg")


@pytest.fixture
def shown(monkeypatch):
    """The axes of each figure that a cell would show."""
    figures = []
    monkeypatch.setattr(plt, "show", lambda: figures.append(plt.gcf().axes))
    return figures


def colour_of(patch):
    return pytest.approx(to_rgb(patch.get_facecolor()))


def test_a_request_is_pale_while_it_waits_full_while_it_runs_and_nowhere_else():
    steps = [(["a"], ["b"]), (["a"], []), ([], [])]

    image = plots.lanes(steps, {"a": "json", "b": "base"})

    assert image[0, 0].tolist() == [*to_rgb(plots.COLOURS["json"]), 1]
    assert image[1, 0].tolist() == [*to_rgb(plots.COLOURS["base"]), 0.3]
    assert (image[1, 1:] == 1).all() and (image[:, 2] == 1).all()


def test_rows_are_dark_where_their_own_numbers_are_large_and_white_where_they_are_zero():
    numbers = np.array([[0.0, 2.0], [100.0, 0.0], [5.0, 5.0]])

    image = plots.shaded(numbers, ["json", "sql", None])

    assert image[0, 1] == pytest.approx(to_rgb(plots.COLOURS["json"]), abs=0.02)
    assert image[1, 0] == pytest.approx(to_rgb(plots.COLOURS["sql"]), abs=0.02)
    assert image[0, 0].tolist() == image[1, 1].tolist() == [1, 1, 1]
    assert (image[2] == 1).all()


def test_tokens_of_a_step_stand_on_each_other_in_the_colours_of_their_adapters(shown):
    plots.tokens_by_step([[("json", 3), ("base", 5)], [("sql", 2)]])

    bars = [(bar.get_y(), bar.get_height()) for bar in shown[0][0].patches]
    assert bars == [(0, 3), (3, 5), (0, 2)]
    assert [to_rgb(plots.COLOURS[name]) for name in ("json", "base", "sql")] == [
        colour_of(bar) for bar in shown[0][0].patches
    ]


def test_parts_of_a_case_add_up_to_its_bar(shown):
    plots.shares({"decode": {"A": 10.0, "B": 5.0}, "prefill": {"A": 1.0, "B": 2.0}})

    [axes] = shown[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 10), (0, 1), (10, 5), (1, 2)]
    assert [text.get_text() for text in axes.texts] == ["15.0%", "3.0%"]


def test_slots_are_drawn_above_memory_newest_first(shown):
    plots.slots_over_time([([1, None], [2, 1]), ([1, 2], [1, 2])], "two steps")

    slots, memory = (axes.images[0].get_array() for axes in shown[0])
    first, second = (to_rgb(colour) for colour in plots.SERIES[:2])
    assert [tuple(colour) for colour in slots[:, 0]] == [first, (1, 1, 1)]
    assert [tuple(colour) for colour in memory[:, 0]] == [first, second]
    assert [tuple(colour) for colour in memory[:, 1]] == [second, first]


def test_a_picture_in_given_axes_is_shown_by_who_made_them(shown):
    with plots.picture(columns=2) as (left, right):
        plots.lines({"a": [1, 2]}, axes=left)
        plots.bars({"b": {"x": 1.0}}, axes=right)

    assert len(shown) == 1


def test_of_a_wrong_answer_the_first_difference_is_said(capsys):
    compare("copies", {"one": 1, "two": 2.0, "three": 3}, {"one": 1, "two": 2.001, "three": 4})

    said = capsys.readouterr().out
    assert said.endswith("Yours differs in 1 of 3: for three it says 4, and the engine has 3.\n")
    assert [line.endswith("<") for line in said.splitlines()[1:4]] == [False, False, True]


def test_right_answers_are_said_to_agree(capsys):
    compare("who runs", {"step 0": ["a"], "step 1": []}, {"step 0": ["a"], "step 1": []})

    assert capsys.readouterr().out.endswith("Yours agrees in all 2.\n")


@pytest.mark.parametrize("wrong", [True, 1.01, "1", None])
def test_what_only_looks_like_the_number_differs(wrong, capsys):
    compare("", {"case": 1}, {"case": wrong})

    assert "Yours agrees" not in capsys.readouterr().out


def test_what_is_not_written_yet_is_no_wrong_answer(capsys):
    compare("copies", {"one": 1}, {"one": None})

    assert "Yours says nothing of one yet." in capsys.readouterr().out
