"""`lab api 7.4`: what an exercise may use, as signatures and docstrings. No body of ours is shown.

It is what the exercise's module defines beside its regions, and what it imports from the engine.
"""

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from labs.kit.overlay import engine_file
from labs.kit.regions import Exercise, Function, find_regions

Definition = Function | ast.ClassDef


class Entry(NamedTuple):
    """where: a module; text: signatures and docstrings, a definition or a class with its methods"""

    where: str
    text: str


def contract(exercise: Exercise) -> str:
    """What a blank page has to promise; "" for an exercise whose starter says it."""
    return exercise.contract.read_text(encoding="utf-8") if exercise.is_blank else ""


def page_of(exercise: Exercise) -> tuple[dict[str, str], list[Entry]]:
    """What its hints name (function -> sentence), and what there is in its module and in those that it imports."""
    tree = ast.parse(exercise.text)
    asked = {
        line
        for region in find_regions(exercise.text, exercise.module)
        if region.exercise == exercise.number
        for line in range(region.start + 1, region.stop + 1)
    }
    entries = [
        Entry(exercise.module, text)
        for node in tree.body
        if isinstance(node, Definition) and node.lineno not in asked and (text := shown(node, asked))
    ]
    for module, name in imported(tree):
        if (node := definition(module, name)) is not None:
            entries.append(Entry(module, shown(node, is_own=False)))
    return dict(exercise.recipes.get(exercise.number, {})), entries


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported from the engine."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minivllm."):
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def definition(module: str, name: str) -> Definition | None:
    """A class or function of a module of the engine; None for anything else, such as a constant."""
    path = engine_file(module)
    if not path.is_file():
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next((n for n in tree.body if isinstance(n, Definition) and n.name == name), None)


def shown(node: Definition, leave_out: frozenset[int] | set[int] = frozenset(), is_own: bool = True) -> str:
    """The signature and the docstring; of a class its methods, too, with what their first lines say.

    leave_out   lines of methods that are not shown: they are what is asked for
    is_own      of the exercise's module: methods that are not public are shown as well
    """
    said = ast.get_docstring(node) or ""
    if isinstance(node, Function):
        return f"{signature(node)}\n{indented(said)}".rstrip()
    lines = [
        f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".replace("()", ""),
        indented(said),
    ]
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            lines.append(f"    {child.target.id}: {ast.unparse(child.annotation)}")
        if isinstance(child, Function) and child.lineno not in leave_out and (is_own or child.name[0] != "_"):
            summary = (ast.get_docstring(child) or "").partition("\n\n")[0]
            lines += [f"    {signature(child)}", indented(summary, 8)]
    return "\n".join(line for line in lines if line.strip())


def signature(function: Function) -> str:
    """As it is called: a property without brackets, a method without self."""
    names = {ast.unparse(decorator) for decorator in function.decorator_list}
    gives = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    if names & {"property", "cached_property"}:
        return f"{function.name}{gives}"
    arguments = ast.unparse(function.args).removeprefix("self, ").removeprefix("cls, ")
    return f"{function.name}({'' if arguments in ('self', 'cls') else arguments}){gives}"


def indented(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line if line else "" for line in text.splitlines())
