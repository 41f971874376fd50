"""`lab api 7.4`: what an exercise may use, as signatures and what their docstrings say first. No body of ours is shown.

Of what its module defines beside its regions, and of what that imports from the engine, it is what the exercise's text
names and what our code for it uses. Of a blank page it is what the contract names.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from labs.kit.overlay import engine_file
from labs.kit.regions import Exercise, Function, find_regions

Definition = Function | ast.ClassDef
_QUOTED = re.compile(r"`([^`]+)`")
_WORD = re.compile(r"\w+")
_FORWARDED = re.compile(r"""(\w+) = property\(attrgetter\('\w+\.\1'\)\)""")
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
        said = contract(exercise)
        without_arguments = re.sub(r"(?<=\w)\([^()]*\)", "", said)
        names = named(without_arguments) | (names_in(tree, asked) & set(_WORD.findall(said)))
    else:
        names = names_in(tree, asked) | named(" ".join(recipes.values()))
    types = reached(exercise.module, tree, asked, names)
    entries = [
        Entry(exercise.module, text)
        for node in tree.body
        if isinstance(node, Definition)
        and node.lineno not in asked
        and (isinstance(node, Function) or (exercise.module, node.name) in types)
        and (text := shown(node, names, asked))
    ]
    found = {(exercise.module, node.name) for node in tree.body if isinstance(node, ast.ClassDef)}
    for module, name in dict.fromkeys(imported(tree)):
        node = table_of(module).get(name)  # anything else, such as a constant, is no entry
        is_asked_for = isinstance(node, Function) or (
            isinstance(node, ast.ClassDef) and (module, name) in types
        )
        if is_asked_for and (text := shown(node, names)):
            entries.append(Entry(module, text))
            found.add((module, name))
    for module, name in inherited(found):
        if (module, name) not in found and (text := shown(table_of(module)[name], names)):
            entries.append(Entry(module, text))
    wanted = {member for home, name in found for member in forwarded(table_of(home).get(name)) & names}
    for module, name in sorted(types - found):
        node = table_of(module)[name]
        own = wanted & (
            {child.name for child in node.body if isinstance(child, Function)}
            | set(re.findall(r"^(\w+) {2,}", ast.get_docstring(node) or "", re.MULTILINE))
        )
        if own and not any(entry.text.startswith(f"class {name}") for entry in entries):
            entries.append(Entry(module, shown(node, own)))
    return recipes, entries


def forwarded(node: ast.stmt | str | None) -> set[str]:
    """Names of a class's that are those of something it holds: `tell = property(attrgetter("tiers.tell"))`."""
    lines = [ast.unparse(child) for child in getattr(node, "body", ()) if isinstance(child, ast.Assign)]
    return {found[1] for line in lines if (found := _FORWARDED.fullmatch(line))}


def inherited(classes: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The engine's classes that these derive from, by way of others, too; each once."""
    todo, seen = list(classes), set(classes)
    while todo:
        home, _, node = resolved(*todo.pop(0))
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            for word in sorted(words_of(base)):
                module, word, found = resolved(home, word)
                if isinstance(found, ast.ClassDef) and (module, word) not in seen:
                    seen.add((module, word))
                    todo.append((module, word))
                    yield module, word


def reached(module: str, tree: ast.Module, asked: set[int], names: set[str]) -> set[tuple[str, str]]:
    """(module, name) of each class whose members the names may mean: a like-named member of another is left out.

    They are the classes around what is asked for, those that it and the names mention, and from there on their bases
    and what is said to be the type of a member that has one of the names.
    """
    within = [
        node
        for node in ast.walk(tree)
        if isinstance(node, Definition) and not asked.isdisjoint(range(node.lineno, node.end_lineno + 1))
    ]
    todo = [(module, name) for name in names]
    for node in within:
        todo.append((module, node.name))
        if isinstance(node, Function):
            todo += [(module, word) for word in words_of(node)]
    found: set[tuple[str, str]] = set()
    seen = set(todo)
    while todo:
        home, name, node = resolved(*todo.pop())
        if isinstance(node, ast.ClassDef):
            found.add((home, name))
        new = {(home, word) for word in mentioned(node, names)} - seen
        seen |= new
        todo += new
    return found


def mentioned(node: ast.stmt | None, names: set[str]) -> set[str]:
    """Words of the types that a definition leads to: a function's result, a class's bases and named members."""
    if isinstance(node, Function):
        return words_of(node.returns)
    if isinstance(node, ast.Assign):
        return words_of(node.value)  # another name of a type
    if not isinstance(node, ast.ClassDef):
        return set()
    found = {word for base in node.bases for word in words_of(base)}
    wanted: set[str] = set()
    new = names
    while new - wanted:  # what a member is made from has a type, too
        wanted, new = wanted | new, set()
        for child in ast.walk(node):
            if isinstance(child, ast.AnnAssign) and words_of(child.target) & wanted:
                found |= words_of(child.annotation)
            elif isinstance(child, ast.Assign) and any(words_of(t) & wanted for t in child.targets):
                new |= words_of(child.value) - {"self"}
            elif isinstance(child, Function) and child.name in wanted:
                found |= words_of(child.returns)
            elif isinstance(child, ast.arg) and child.arg in wanted:
                found |= words_of(child.annotation)
        found |= new
    return found


def words_of(node: ast.AST | None) -> set[str]:
    return set(_WORD.findall(ast.unparse(node))) if node else set()


def resolved(module: str, name: str) -> tuple[str, str, ast.stmt | None]:
    """Where a name of a module is defined, in it or in the engine's module from which it is imported."""
    found = table_of(module).get(name)
    return resolved(found, name) if isinstance(found, str) else (module, name, found)


@cache
def table_of(module: str) -> dict[str, ast.stmt | str]:
    """Name -> its definition in a module of the engine, or the engine's module from which it is imported."""
    tree = tree_of(module)
    table: dict[str, ast.stmt | str] = {name: home for home, name in imported(tree)}
    for node in tree.body:
        if isinstance(node, Definition):
            table[node.name] = node
        elif isinstance(node, ast.Assign):
            table |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return table


def names_in(tree: ast.Module, lines: set[int]) -> set[str]:
    """What is called or looked up there, and what docstrings there name; variables of its own are none of it."""
    found, own, members = set(), set(), set()
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) not in lines:
            continue
        if isinstance(node, ast.Name):
            (own if isinstance(node.ctx, ast.Store) else found).add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Attribute):
            members.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            members.add(node.arg)
        elif isinstance(node, Definition):
            members |= named(ast.get_docstring(node) or "")
    return (found - own) | members


def named(text: str) -> set[str]:
    """Every word of what stands between backticks."""
    return {word for quoted in _QUOTED.findall(text) for word in _WORD.findall(quoted)}


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported from the engine."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minivllm."):
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def tree_of(module: str) -> ast.Module:
    """Of a module of the engine; empty for one that is none."""
    path = engine_file(module)
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


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
