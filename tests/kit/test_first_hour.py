"""docs/first-hour.md: what it says that `lab` prints is what `lab` prints, but for seconds and dates."""

import re
from itertools import groupby

import pytest
from checkout import Checkout

from labs.kit.regions import ROOT

PAGE = (ROOT / "docs" / "first-hour.md").read_text()
BLOCKS = re.findall(r"^```(console|python)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
# Cheap enough for each day; the others compare failures with those of known mistakes, or run a whole phase.
BY_DAY = ["lab", "lab hint 1.1", "lab check 1.1"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("first_hour"), "pyproject.toml")


def blocks_of(command):
    """What the page shows that a command prints, once for each time that it is given."""
    given = [
        part for kind, text in BLOCKS if kind == "console" for part in re.split(r"^\$ ", text, flags=re.M)
    ]
    return [rest for first, _, rest in (part.partition("\n") for part in given) if first == command]


def without_times(text):
    return re.sub(r"\d+\.\d s\b|\d{8}-\d{6}", "TIME", text).rstrip().splitlines()


def assert_is_printed(shown, checkout, *command, stdin=""):
    """Lines between `...` stand in the output one after the other, and in the page's order.   stdin: what is typed"""
    result = checkout.lab(*command, stdin=stdin)
    printed, at = (
        without_times(result.stdout.replace("[y/N]: ", f"[y/N]: {stdin}")),
        0,
    )  # as a terminal echoes it
    assert printed, result.stderr
    for is_cut, lines in groupby(without_times(shown), "...".__eq__):
        if not is_cut:
            wanted = list(lines)
            places = [i for i in range(at, len(printed)) if printed[i : i + len(wanted)] == wanted]
            assert places, f"{wanted} is not in:\n" + "\n".join(printed[at:])
            at = places[0] + len(wanted)
    if not shown.rstrip().endswith("..."):
        assert at == len(printed), printed[at:]


def answers_of_the_page():
    """The three that it tries out for 1.1."""
    first, second = (text for kind, text in BLOCKS if kind == "python")
    [check] = re.findall(r"So the middle check becomes\n`(.*)`:$", PAGE, re.MULTILINE)
    [old] = re.findall(r"^ +if (not isinstance\(self\.lora_int_id, int\).*):$", second, re.MULTILINE)
    return [first, second, second.replace(old, check)]


def write(checkout, answer):
    """In the place of the stub of 1.1, or of another answer."""
    path = checkout.file("1.1")
    fresh = checkout.fresh[path]
    [stub] = re.findall(r'^ +raise Todo\("lab 1\.1.*\n', fresh, re.MULTILINE)
    path.write_text(fresh.replace(stub, answer))


def test_where_a_learner_is_and_what_is_still_to_do_are_printed_as_on_the_page(checkout):
    checkout.forget()

    for command in BY_DAY:
        assert_is_printed(blocks_of(command)[0], checkout, *command.split()[1:])


@pytest.mark.nightly
def test_the_answers_that_it_tries_are_judged_as_on_the_page(checkout):
    checkout.forget()

    for answer, shown in zip(answers_of_the_page(), blocks_of("lab check 1.1")[1:], strict=True):
        write(checkout, answer)
        assert_is_printed(shown, checkout, "check", "1.1")
    assert_is_printed(blocks_of("lab reset 1.1")[0], checkout, "reset", "1.1", stdin="y\n")


@pytest.mark.nightly
def test_a_phase_that_is_done_is_told_as_on_the_page(checkout):
    checkout.forget()
    checkout.solve("3.1", "3.2", "3.3", "3.4", "3.5", "3.6")

    assert_is_printed(blocks_of("lab check 3")[0], checkout, "check", "3")
