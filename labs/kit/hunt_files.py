"""What a learner mends: a broken module without its docstrings and comments, and without answers to other exercises.

Docstrings and comments say what the code should do, so a fault would be found by comparing the two, and not by thinking
about the symptom. Code of exercises that the fault is not in is left out until they are solved, and put back when the
module is loaded. Of a solved one it is shown, because what is missing would tell where the fault is.
"""

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher

from labs.kit.regions import find_regions, left_out, splice

WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
OPENING = re.compile(r"(# region lab [\d.]+: ).*")  # its title may be the rule that the fault breaks
# First line, line past the last, counted from 0; what takes their place.
Replaced = tuple[int, int, list[str]]


def handed_out(sound: str, broken: str, where: str, solved: Collection[str] = ()) -> str:
    """The broken text as a learner gets it.

    sound, broken   a module's text, with the marks of its regions
    solved          exercises whose code is shown as well
    """
    shown = _exercises_with_fault(sound, broken, where).union(solved)
    tree, lines = ast.parse(broken), broken.split("\n")
    replaced = [*_docstrings(tree, lines), *_comments(broken)]
    for region in find_regions(broken, where):
        if region.exercise not in shown:
            stub = f"...  {_left_out(region.exercise)}"
            bodies = list(left_out(tree, lines, region, where, stub))
            hidden = {line for first, last, _ in bodies for line in range(first, last)}
            replaced = [*(one for one in replaced if one[0] not in hidden), *bodies]
    for first, last, new in sorted(replaced, reverse=True):
        lines[first:last] = new
    text = "\n".join(lines).lstrip("\n")
    ast.parse(text, where)
    return text


def shown_in(text: str, where: str) -> set[str]:
    """The exercises of which nothing is left out of a learner's version. LabError where a mark is missing."""
    numbers = {region.exercise for region in find_regions(text, where)}
    return {number for number in numbers if _left_out(number) not in text}


def _left_out(exercise: str) -> str:
    return f"# lab {exercise}: our code runs here"


def whole(text: str, sound: str, where: str) -> tuple[str, list[int] | None]:
    """A learner's version with our code put back; for each of its lines the line in the learner's file.

    A version without any region is whole. LabError where regions are not those of the module.
    """
    if not find_regions(text, where):
        return text, None
    return splice(text, sound, shown_in(text, where), where)


def _exercises_with_fault(sound: str, broken: str, where: str) -> set[str]:
    """The exercises in whose regions the two texts differ."""
    matcher = SequenceMatcher(None, sound.split("\n"), broken.split("\n"), autojunk=False)
    differ = [
        (first, max(last, first + 1)) for kind, _, _, first, last in matcher.get_opcodes() if kind != "equal"
    ]
    regions = find_regions(broken, where)
    return {r.exercise for r in regions if any(first < r.stop and r.start < last for first, last in differ)}


def _docstrings(tree: ast.Module, lines: list[str]) -> Iterator[Replaced]:
    """All docstrings, each with the blank line after it."""
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            end = docstring.end_lineno
            yield (
                docstring.lineno - 1,
                end + (not lines[end].strip()),
                [" " * docstring.col_offset + "pass"] if len(node.body) == 1 else [],
            )


def _comments(text: str) -> Iterator[Replaced]:
    """All comments, and the titles of regions; their marks stay."""
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or token.string == "# endregion":
            continue
        row, column = token.start
        before = lines[row - 1][:column]
        if OPENING.match(token.string):
            yield row - 1, row, [before + OPENING.sub(r"\1code of an exercise", token.string)]
        elif before.strip():
            yield row - 1, row, [before.rstrip()]
        else:  # with the blank line after it, if it stands between two
            is_apart = not lines[row - 2].strip() and not lines[row].strip()
            yield row - 1, row + is_apart, []
