"""Predict, then measure: what is counted, of whose code, and what a notebook shows of it."""

import json

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from checkout import Checkout

from labs.kit.measures import QUESTIONS
from labs.kit.predict import compare, predict
from labs.kit.regions import ROOT

matplotlib.use("Agg")

# Worked out on paper, or by a few lines that know nothing of the engine.
TRUTHS = {
    "2": 4 * 32 * 4 * (3 * 576 + 576 + 192 + 192) / 1000,
    "3": 1 + 2 * 24,  # each token is a run: a shrink and an expand
    "4": (4 * (16 * 256 + 8 * 16 * 256 + 16 * 16)) / 1000,
    "5": 120,  # each is thrown out just before it comes again
    "6": 8 + 1,
    "7": 3,
}


@pytest.mark.parametrize("phase", TRUTHS)
def test_what_is_counted_is_what_arithmetic_says(phase):
    question = QUESTIONS[phase]

    # A tile list is a few bytes more.
    assert question.count()[question.case] == pytest.approx(
        TRUTHS[phase], rel=0.02 if phase == "4" else 1e-12
    )


def test_the_memory_of_an_adapter_is_that_of_its_tensors_in_float32():
    from safetensors import safe_open

    with safe_open(ROOT / "adapters" / "sql" / "adapter_model.safetensors", "pt") as file:
        numbers = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (it is no dict)

    assert QUESTIONS["1"].count()["sql"] == pytest.approx(4 * numbers / 1e6)


@pytest.mark.parametrize("phase", QUESTIONS)
def test_a_notebook_asks_before_it_wants_a_number_and_names_the_unit(phase):
    [path] = ROOT.glob(f"phases/0{phase}_*/walkthrough.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    guess = next(i for i, cell in enumerate(cells) if "my_guess = None" in cell.source)

    asked, told = cells[guess - 1].source.split("Before you read on: ")

    assert QUESTIONS[phase].text in asked
    assert told.startswith(f"put your number of {QUESTIONS[phase].unit} into `my_guess`")


@pytest.fixture
def shown(monkeypatch):
    """The figures that a cell would show: heights of their bars, in each the largest first."""
    heights = []

    def show():
        heights.append(sorted((bar.get_height() for bar in plt.gcf().axes[0].patches), reverse=True))

    monkeypatch.setattr(plt, "show", show)
    return heights


def test_without_a_guess_nothing_gives_the_number_away(capsys, shown):
    predict("5", None)

    said = capsys.readouterr().out
    assert "How many miss?" in said
    assert "our code" not in said and "why" not in said
    assert shown == [[4, 3, 2]]


def test_with_a_guess_the_count_stands_beside_it(capsys, shown):
    predict("5", 24)

    said = capsys.readouterr().out
    assert "your guess: 24 misses; our code: 120\n" in said and "\nwhy: The adapter that comes next" in said
    assert shown == [[120, 4, 3, 2]]


def test_where_more_is_better_more_is_told_as_better(capsys):
    engine = {"still": 600, "favourites": 892, "moves": 588}

    compare("found", engine, {"still": 699, "favourites": 892, "moves": 500}, better="more")

    *table, verdict = capsys.readouterr().out.splitlines()
    assert [row.split()[-1] for row in table] == ["found", "ahead", "level", "behind"]
    assert verdict == "Yours is ahead in 1, level in 1 and behind in 1: more is better."


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        (7, "Yours is ahead in 0, level in 0 and behind in 1: less is better."),
        (5, "Yours is ahead in 1, level in 0 and behind in 0: less is better."),
        (None, "Yours says nothing of a yet."),
    ],
)
def test_where_less_is_better_less_is_told_as_better(capsys, mine, told):
    compare("copies", {"a": 6}, {"a": mine}, better="less")

    assert capsys.readouterr().out.endswith(f"\n{told}\n")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("predict"))


ASK = "import json\nfrom labs.kit.predict import measured\nprint(json.dumps(measured('5')))"


def test_a_learners_code_is_counted_beside_ours(checkout):
    checkout.answer("5.1", ("self.move_to_end(key)", "self.move_to_end(key, last=False)"))

    done = checkout.execute(ASK, labs="5.1")

    # Who throws out what was used last keeps three of five: after four misses every fourth request is one.
    ours, theirs = json.loads(done.stdout)
    assert (ours["5 adapters"], theirs["5 adapters"]) == (120, 4 + 116 / 4)


@pytest.mark.nightly
def test_of_a_phase_that_is_still_to_do_ours_is_shown(checkout):
    checkout.forget()

    done = checkout.execute(ASK, labs="5.1")

    said, counts = done.stdout.splitlines()
    assert said.startswith("your code: TODO lab 5.1")
    assert json.loads(counts)[1] is None


def test_another_phases_code_is_not_asked(checkout):
    checkout.solve("3.1")

    done = checkout.execute(ASK, labs="3.1")

    assert json.loads(done.stdout)[1] is None
