"""Two versions of an exercise's code as `lab diff` shows them: docstrings folded, and what is alike named in a line."""

import ast
from collections.abc import Iterator
from difflib import SequenceMatcher

from labs.kit.regions import Function

FOLDED = '"""..."""'
SIGN = "> "
ALIKE = "...  # the same in both"
DOCUMENTED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def beside(yours: str, ours: str) -> tuple[str, str]:
    """Both without their docstrings, and without the bodies of functions that do the same in both.

    What Python cannot read is shown whole.
    """
    try:
        trees = ast.parse(yours), ast.parse(ours)
    except SyntaxError:
        return yours, ours
    mine, theirs = (dict(_functions(tree)) for tree in trees)
    alike = {name for name in mine.keys() & theirs.keys() if meaning(mine[name]) == meaning(theirs[name])}
    return _folded(yours, trees[0], mine, alike), _folded(ours, trees[1], theirs, alike)


def differing(yours: str, ours: str) -> tuple[set[int], set[int]]:
    """The lines of each, from 1, that the other has not; of empty lines none."""
    texts = yours.split("\n"), ours.split("\n")
    stripped = [[line.strip() for line in lines] for lines in texts]
    found: tuple[set[int], set[int]] = (set(), set())
    for kind, *spans in SequenceMatcher(None, *stripped, autojunk=False).get_opcodes():
        for marked, lines, (first, last) in zip(found, stripped, (spans[:2], spans[2:])):
            marked |= {n + 1 for n in range(first, last) if kind != "equal" and lines[n]}
    return found


def signed(text: str, marked: set[int]) -> str:
    """Its lines, those that are marked with a sign before them."""
    return "\n".join(
        f"{SIGN if number in marked else '  '}{line}".rstrip()
        for number, line in enumerate(text.split("\n"), 1)
    )


def _functions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods by their qualified names; those within another function are a part of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield owner + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{owner}{child.name}.")


def meaning(statement: ast.stmt) -> str:
    """What it is to Python: without docstrings, comments and layout."""
    copied = ast.parse(ast.unparse(statement)).body[0]
    for node in ast.walk(copied):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(copied)


def _folded(text: str, tree: ast.Module, functions: dict[str, Function], alike: set[str]) -> str:
    lines = text.split("\n")
    folds = [(f.body[0].lineno, f.end_lineno, ALIKE) for name, f in functions.items() if name in alike]
    hidden = {line for first, last, _ in folds for line in range(first, last + 1)}
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            said = node.body[0]
            if said.lineno not in hidden and said.lineno > node.lineno:
                folds.append((said.lineno, said.end_lineno, FOLDED))
    for first, last, new in sorted(folds, reverse=True):
        line = lines[first - 1]
        lines[first - 1 : last] = [line[: len(line) - len(line.lstrip())] + new]
    return "\n".join(lines)
