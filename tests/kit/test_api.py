"""`lab api`: signatures and docstrings of what an exercise may use, that and no more, and no answer."""

import ast
import re
from functools import cache

import pytest

from labs.kit.api import page_of
from labs.kit.path import track_of
from labs.kit.regions import ROOT, Function, read_engine
from tests.tools.nights import by_day

EXERCISES = read_engine()
# Its text gives the shapes; the model is of any architecture, so no annotation leads there.
NOT_SHOWN = {"7.3": ["compute_logits"]}


@cache
def text_of(number):
    _, entries = page_of(EXERCISES[number])
    return "\n".join(entry.text for entry in entries)


some = pytest.mark.parametrize("number", by_day(EXERCISES))


@some
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


@some
def test_what_our_code_takes_of_other_modules_is_there(number):
    """Functions and classes that it calls by a name it has imported from the engine."""
    exercise, page = EXERCISES[number], text_of(number)
    assert len(page.splitlines()) <= 100
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


@pytest.mark.parametrize("number", by_day(n for n, e in EXERCISES.items() if track_of(e) == "core"))
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


# What stands on an exercise's page, and what does not.
NEEDED = {
    # Of a file of 230 lines that imports from eight others, about a dozen functions and one class.
    "1.6": (
        ("read_tensor(", "is_left_out(", "check_pair(", "check_numbers(", "from_config(", "lora_b"),
        ("from_local_checkpoint", "clone(", "folder_sources", "read_weights", "validate_legal"),
    ),
    # A name means a member of the type that annotations lead to.
    "2.7": (("pack(parts: Parts)",), ("class LinearBase",)),
    "5.2": (("find_slot() -> int",), ("class FullTiers",)),
    "7.3": (("block_ids: list[int]",), ("class Ranks",)),
    # Not `_step(`, which is asked for: a contract says what it promises.
    "7.4": (
        (
            *("_settle_adapters(", "_prepare_adapters(", "_launch(", "_sample(", "_finish("),
            *("schedule()", "update_from_output(", "scheduled: list[ScheduledRequest]"),
        ),
        ("tokens: torch.Tensor", " _step("),
    ),
}


@pytest.mark.parametrize("number", NEEDED)
def test_a_page_has_what_is_needed_and_no_more(number):
    page, (needed, not_needed) = text_of(number), NEEDED[number]

    assert [name for name in needed if name not in page] == []
    assert [name for name in not_needed if name in page] == []


def test_sentences_about_what_to_use_come_first():
    uses, _ = page_of(EXERCISES["7.3"])

    assert uses["_prepare_inputs"].startswith("`all_token_ids`")
