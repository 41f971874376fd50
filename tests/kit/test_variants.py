"""`lab variants`: other right answers pass, all together are an engine, and last hints say what they use."""

import pytest
from checkout import Checkout

from labs.kit import variants
from labs.kit.hints import Hints
from labs.kit.regions import PHASES, ROOT, LabError, read_engine
from labs.kit.variants import drift, with_variant
from tests.tools.nights import by_day, of_night

EXERCISES = read_engine()
ROOMS = (
    *("ahead", "commands", "core", "engine", "examples", "gpu", "layers", "lora", "models", "observe"),
    *("options", "parallel", "policies", "serving", "sizing", "sources", "text", "vllm", "worker"),
)
SUITE = [*(f"tests/{room}" for room in ROOMS), *(f"tests/phase_{phase[:2]}" for phase in PHASES)]


@pytest.mark.parametrize("number", by_day(EXERCISES))
def test_a_last_hint_says_what_its_variant_uses(number):
    exercise = EXERCISES[number]

    assert with_variant(exercise) != exercise.text
    assert drift(exercise) is None


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        ("slots = self.token_slots(len(x)); sorted", None),
        (
            "slots = the slots of the tokens",
            "the last hint does not name token_slots, which the variant uses",
        ),
        (
            "slots = self.token_slots(x) beyond _every_slot",
            "the last hint names _every_slot, which neither our code nor the variant has",
        ),
        ("lora_index_to_id, token_slots", None),
    ],
)
def test_names_that_hint_and_code_do_not_share_are_said(monkeypatch, hint, said):
    code = "def f(self, x):\n    rows = self.token_slots(len(x))\n    return sorted(rows)\n"
    monkeypatch.setattr(variants, "hints_of", lambda exercise: Hints(9, ["", "", hint]))
    monkeypatch.setattr(variants, "variant_of", lambda exercise: code)

    assert drift(EXERCISES["3.1"]) == said


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (EXERCISES["3.1"].code(), "the variant of lab 3.1 is our own code"),
        ("def slots_of(ids):\n    return []\n", "the variant of lab 3.1: slots_of takes other arguments now"),
    ],
)
def test_what_is_no_variant_is_refused(monkeypatch, code, said):
    monkeypatch.setattr(variants, "variant_of", lambda exercise: code)

    with pytest.raises(LabError, match=said):
        with_variant(EXERCISES["3.1"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("variants"))


def signs(result):
    return {line.partition(":")[0]: line for line in result.stdout.strip().split("\n")}


def test_a_variant_passes_its_exercises_tests_or_is_an_error(shared):
    path = shared.file("3.4").parent / "variants/3.4.toml"
    right = path.read_text()

    passes = shared.lab("variants", "3.4")
    path.write_text(right.replace(">= 0", ">= -1"))
    fails = shared.lab("variants", "3.4")

    path.write_text(right)
    assert [*signs(passes)] == ["✓ 3.4"], passes.stdout
    assert fails.stdout.startswith("✗ 3.4: tests/phase_03/test_")
    assert (passes.returncode, fails.returncode) == (0, 1)


@pytest.mark.nightly
def test_every_variant_passes_its_exercises_tests(shared):
    result = shared.lab("variants")

    assert sorted(signs(result)) == sorted(f"✓ {number}" for number in EXERCISES), result.stdout


@pytest.mark.nightly
def test_all_variants_together_are_an_engine(tmp_path):
    """In two nights: half of the files in each."""
    checkout = Checkout(tmp_path, "adapters", "benchmarks", "examples")
    checkout.take_variants()
    files = [path.relative_to(ROOT) for folder in SUITE for path in (ROOT / folder).rglob("test_*.py")]
    half = of_night(sorted(map(str, files)), 2)

    # Which files a reader enters is said of our code.
    readers = "tests/engine/test_plain_life.py"
    result = checkout.pytest("-n", "2", "--ignore", readers, *half, labs="all")

    assert result.returncode == 0, result.stdout[-4000:]
