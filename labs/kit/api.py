"""`lab api 7.4`: what an exercise may use, as signatures and what their docstrings say first. No body of ours is shown.

Of what its module defines beside its regions, and of what that imports from the engine, it is what the exercise's text
names and what our code for it uses. Of a blank page it is what the contract names.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from labs.kit.overlay import engine_file
from labs.kit.regions import Exercise, Function, find_regions

Definition = Function | ast.ClassDef
_QUOTED = re.compile(r"`([^`]+)`")
_ROW = re.compile(r"([`\w][\w`, .()]*?) {2,}\S")  # of a table in a docstring


class Entry(NamedTuple):
    """where: a module; text: signatures and docstrings, a definition or a class with its methods"""

    where: str
    text: str


def contract(exercise: Exercise) -> str:
    """What a blank page has to promise; "" for an exercise whose starter says it."""
    return exercise.contract.read_text(encoding="utf-8") if exercise.is_blank else ""


def page_of(exercise: Exercise) -> tuple[dict[str, str], list[Entry]]:
    """What its hints name (function -> sentence), and what there is to use, of its module and of what that imports."""
    tree = ast.parse(exercise.text)
    asked = {
        line
        for region in find_regions(exercise.text, exercise.module)
        if region.exercise == exercise.number
        for line in range(region.start + 1, region.stop + 1)
    }
    recipes = dict(exercise.recipes.get(exercise.number, {}))
    if exercise.is_blank:
        names = named(contract(exercise))
    else:
        names = names_in(tree, asked) | named(" ".join(recipes.values()))
    entries = [
        Entry(exercise.module, text)
        for node in tree.body
        if isinstance(node, Definition) and node.lineno not in asked and (text := shown(node, names, asked))
    ]
    for module, name in dict.fromkeys(imported(tree)):
        if (node := definition(module, name)) is not None and (text := shown(node, names)):
            entries.append(Entry(module, text))
    return recipes, entries


def names_in(tree: ast.Module, lines: set[int]) -> set[str]:
    """What is called or looked up there, and what docstrings there name."""
    found = set()
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) not in lines:
            continue
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, Definition):
            found |= named(ast.get_docstring(node) or "")
    return found


def named(text: str) -> set[str]:
    """Every word of what stands between backticks."""
    return {word for quoted in _QUOTED.findall(text) for word in re.findall(r"\w+", quoted)}


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


def shown(node: Definition, names: set[str], asked: frozenset[int] | set[int] = frozenset()) -> str:
    """The signature, and the docstring's beginning and tables; "" for what none of the names means.

    asked   lines of what is asked for, where it is of the same module: a class around them is shown, and they are not

    Of a class only those members are shown, and those lines of tables, that are among the names.
    """
    said = ast.get_docstring(node) or ""
    if isinstance(node, Function):
        return f"{signature(node)}\n{indented(kept_of(said))}".rstrip() if node.name in names else ""
    members = []
    for child in node.body:
        if (
            isinstance(child, ast.AnnAssign)
            and isinstance(child.target, ast.Name)
            and child.target.id in names
        ):
            members.append(f"    {child.target.id}: {ast.unparse(child.annotation)}")
        if isinstance(child, Function) and child.name in names and child.lineno not in asked:
            if child.name[0] == "_" and not asked:
                continue  # of another module
            members += [f"    {signature(child)}", indented(kept_of(ast.get_docstring(child) or ""), 8)]
    is_around = not asked.isdisjoint(range(node.lineno, node.end_lineno + 1))
    if not (members or is_around or node.name in names):
        return ""
    first = f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".replace("()", "")
    return "\n".join(line for line in [first, indented(kept_of(said, names)), *members] if line.strip())


def kept_of(docstring: str, names: set[str] | None = None) -> str:
    """The first paragraph, and tables (`name   what it is`); of these the lines that have one of the names, or all."""
    first, *others = docstring.split("\n\n")
    kept = [first]
    for rows in (re.split(r"\n(?=\S)", paragraph) for paragraph in others):
        cells = [_ROW.match(row) for row in rows]
        if any(cells):
            kept += [
                row
                for row, cell in zip(rows, cells)
                if names is None or (cell and not names.isdisjoint(re.findall(r"\w+", cell[1])))
            ]
    return "\n".join(kept)


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
