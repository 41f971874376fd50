"""`lab mutants`: a mistake must apply, change something, and be caught."""

import pytest
from checkout import Checkout

GOOD = '''
[[mutant]]
name = "last_slot_for_base_rows"
misconception = "Slot -1 means no adapter; as an index it is the last slot."
old = """
        if slot >= 0:
            shrunk ="""
new = """
        if slot >= -1:
            shrunk ="""
'''


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("mutants"))


@pytest.fixture
def judge(shared):
    """Verdicts on the mutants of a file, by name, and the exit status."""
    return lambda number, text: verdicts_of(shared, number, text)


def verdicts_of(checkout, number, text):
    path = checkout.file(number).parent / "mutants" / f"{number}.toml"
    path.write_text(text)
    result = checkout.lab("mutants", number)
    lines = [line for line in result.stdout.split("\n") if line[:1] in ("✓", "✗")]
    named = {line.split(": ")[0].split(" ", 2)[2]: (line[0], line.partition(": ")[2]) for line in lines}
    return named, result


def mutant(old, new, name="tried"):
    return f"[[mutant]]\nname = '{name}'\nmisconception = 'None.'\nold = '''{old}'''\nnew = '''{new}'''\n"


def test_a_mistake_that_the_tests_see_is_caught_in_however_many_places_it_is(judge):
    several = mutant("", "", "several").replace("old = ''''''\nnew = ''''''\n", "")
    for old, new in (("if slot >= 0:", "if slot >= -1:"), ("scaling * shrunk", "shrunk")):
        several += f"[[mutant.edit]]\nold = '''{old}'''\nnew = '''{new}'''\n"

    verdicts, result = judge("3.2", GOOD + several)

    sign, text = verdicts["last_slot_for_base_rows"]
    assert (sign, result.returncode) == ("✓", 0)
    assert text.startswith("caught by test_")
    assert verdicts["several"][0] == verdicts["(the engine)"][0] == "✓"


# Changes, and what is said of them.
NONE = {
    "unseen": ("if slot >= 0:", "if slot > -1:", "SURVIVED"),
    "a comment": ("if slot >= 0:", "if slot >= 0:  # is it?", "changes nothing but comments"),
    "nowhere": ("if slot >= 1:", "if slot >= 0:", "0 times, not once"),
    "in two places": ("slot", "row", "times, not once"),
    "of lab 3.3": ("kept + expanded", "expanded", "0 times, not once"),
    "no import": (
        "lora_a_weights: torch.Tensor",
        "lora_a_weights: torch.Tensro",
        "breaks tests/phase_03/test_",
    ),
}


@pytest.fixture(scope="module")
def wrong(shared):
    text = "".join(mutant(old, new, name) for name, (old, new, _) in NONE.items())
    return verdicts_of(shared, "3.2", text + GOOD + GOOD)


@pytest.mark.parametrize("name", NONE)
def test_a_mistake_that_is_none_or_goes_unseen_is_reported(wrong, name):
    (sign, said), result = wrong[0][name], wrong[1]

    assert sign == "✗"
    assert NONE[name][2] in said
    assert "two mutants are called last_slot_for_base_rows" in result.stdout
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[mutant]]\nname = 'x'\n", "labs/03_cpu_punica/mutants/3.2.toml: a mutant has no 'misconception'"),
        ("[[mutant]\n", "labs/03_cpu_punica/mutants/3.2.toml: "),
    ],
)
def test_a_file_that_cannot_be_read_is_named(judge, text, sentence):
    result = judge("3.2", text)[1]

    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.nightly
def test_a_mistake_in_a_kernel_is_run_and_shown_by_triton(judge):
    wrong = mutant("h * scaling, mask", "h * 1.0, mask", "forgotten") + mutant(
        "tl.store(out", "tl.nothing(out", "odd"
    )

    verdicts, result = judge("4.2", wrong)

    assert result.returncode == 0, result.stdout
    assert verdicts["forgotten"][1].startswith("caught by test_")
