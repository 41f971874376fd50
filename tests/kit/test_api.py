"""`lab api`: signatures and docstrings of what an exercise may use, that and no more, and no answer."""

import ast
import re
from functools import cache

import pytest

from labs.kit.api import page_of
from labs.kit.path import track_of
from labs.kit.regions import ROOT, Function, read_engine

EXERCISES = read_engine()
# Its text gives the shapes; the model is of any architecture, so no annotation leads there.
NOT_SHOWN = {"7.3": ["compute_logits"]}


@cache
def text_of(number):
    _, entries = page_of(EXERCISES[number])
    return "\n".join(entry.text for entry in entries)


@pytest.mark.parametrize("number", EXERCISES)
def test_no_line_of_code_is_shown(number):
    """Of no exercise, since a page has what the module and its imports define: other answers are among these."""
    page = text_of(number)

    assert [line for line in lines_of_answers() if line in page] == []


@cache
def lines_of_answers():
    """The first line of each statement of all exercises, where it is long enough to be nothing else."""
    found = set()
    for exercise in EXERCISES.values():
        for function in filter(lambda node: isinstance(node, Function), ast.walk(ast.parse(exercise.code()))):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            found |= {ast.unparse(statement).splitlines()[0] for statement in body}
    return sorted(line for line in found if len(line) >= 25)


@pytest.mark.parametrize("number", EXERCISES)
def test_what_our_code_takes_of_other_modules_is_there(number):
    """Functions and classes that it calls by a name it has imported from the engine."""
    exercise, page = EXERCISES[number], text_of(number)
    if exercise.is_blank:
        return  # its contract says what there is
    imported = {
        alias.name
        for node in ast.walk(ast.parse(exercise.text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minivllm.")
        for alias in node.names
        if not alias.name.isupper()
    }
    called = {
        node.func.id
        for node in ast.walk(ast.parse(exercise.code()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }

    assert [name for name in imported & called if name not in page] == []


@pytest.mark.parametrize("number", [n for n, e in EXERCISES.items() if track_of(e) == "core"])
def test_what_its_text_names_of_the_engine_is_on_its_page(number):
    """What stands in backticks under "To use" and in docstrings, and is a function, class or field of the engine.

    What is asked for is not on the page, and neither are its own arguments. `kv_cache.block_size` names `block_size`.
    """
    exercise, page = EXERCISES[number], text_of(number)
    nodes = [
        node for node in ast.walk(ast.parse(exercise.code())) if isinstance(node, Function | ast.ClassDef)
    ]
    own = {node.name for node in nodes}
    own |= {arg.arg for node in nodes for arg in ast.walk(node) if isinstance(arg, ast.arg)}
    uses, _ = page_of(exercise)
    texts = (
        uses.values() if exercise.is_blank else [*uses.values(), *(ast.get_docstring(n) or "" for n in nodes)]
    )
    quoted = " ".join(part for text in texts for part in re.findall(r"`([^`]+)`", text))
    names = set(re.findall(r"\w+\b(?!\.)", re.sub(r"\([^()]*\)", "", quoted))) & names_of_the_engine()

    assert [name for name in sorted(names - own) if not re.search(rf"\b{name}\b", page)] == NOT_SHOWN.get(
        number, []
    )


@cache
def names_of_the_engine():
    """What it defines: functions, classes and annotated fields."""
    found = set()
    for path in (ROOT / "minivllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                found |= set(re.findall(r"\w+$", ast.unparse(node.target)))
    return found


def test_a_page_is_no_longer_than_what_is_needed():
    """Of a file of 230 lines that imports from eight others, 1.6 needs about a dozen functions and one class."""
    page = text_of("1.6")

    for name in ("read_tensor(", "is_left_out(", "check_pair(", "check_numbers(", "from_config(", "lora_b"):
        assert name in page
    for name in ("from_local_checkpoint", "clone(", "folder_sources", "read_weights", "validate_legal"):
        assert name not in page
    assert max(len(text_of(number).splitlines()) for number in EXERCISES) <= 100


def test_what_the_step_needs_is_there():
    page = text_of("7.4")

    for name in ("_settle_adapters(", "_prepare_adapters(", "_launch(", "_sample(", "_finish(", "schedule()"):
        assert name in page
    assert "update_from_output(" in page
    assert " _step(" not in page, "it is what is asked for, and a contract says what it promises"


def test_sentences_about_what_to_use_come_first():
    uses, _ = page_of(EXERCISES["7.3"])

    assert uses["_prepare_inputs"].startswith("`all_token_ids`")


@pytest.mark.parametrize(
    "number, left_out, kept",
    [
        ("2.7", "class LinearBase", "pack(parts: Parts)"),
        ("5.2", "class FullTiers", "find_slot() -> int"),
        ("7.3", "class Ranks", "block_ids: list[int]"),
        ("7.4", "tokens: torch.Tensor", "scheduled: list[ScheduledRequest]"),
    ],
)
def test_a_name_means_a_member_of_the_type_that_annotations_lead_to(number, left_out, kept):
    page = text_of(number)

    assert left_out not in page
    assert kept in page
