"""What a learner's file has outside its exercises, beside what the starter had there.

An exercise is graded with the learner's own surroundings: a signature that was changed by accident breaks another
exercise, or nothing before the engine runs. What a learner adds (helpers, imports, comments) is no difference.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from labs.kit.folding import meaning
from labs.kit.overlay import read
from labs.kit.progress import keep, shown
from labs.kit.regions import ROOT, Exercise, find_regions, splice

MOST = 3  # differences of a file that are named
CONTAINERS = ast.ClassDef | ast.If


class Difference(NamedTuple):
    """A definition, import or assignment of the starter that is another one now, or not there.

    name    in the file, such as `Slots.take_over`
    ours    the starter's
    theirs  the learner's; None where it is gone
    after   of what is gone: the learner's statement that came before it; None if it was the first of `within`
    within  the learner's module, class or `if` that it belongs to
    """

    name: str
    ours: ast.stmt
    theirs: ast.stmt | None
    after: ast.stmt | None
    within: ast.AST


def complaint(exercise: Exercise) -> str | None:
    """What is another thing outside the exercises of the learner's file, where, and how to get it back."""
    text, lines = _with_our_answers(exercise)
    if text.replace("from labs.kit.overlay import Todo\n", "", 1) == exercise.text:
        return None  # as most are: to look for differences takes twenty times as long
    try:
        found = list(_differences(ast.parse(exercise.text), ast.parse(text)))
    except SyntaxError:
        return None  # which is said where the file is graded
    if not found:
        return None
    told = []
    for one in found[:MOST]:
        if one.theirs is None:
            told.append(f"`{one.name}` is gone")
        else:
            first = _first_that_differs(one, exercise.text.split("\n"), text.split("\n"))
            told.append(f"`{one.name}` is changed at line {lines[first - 1]}")
    more = [f"{len(found) - MOST} more"] if len(found) > MOST else []
    return (
        f"{shown(exercise.starter)} differs from the starter outside the exercises: {', '.join(told + more)}; "
        f"`lab reset {exercise.number} --outside` puts that back, and leaves your answers and what you added"
    )


def put_back(exercise: Exercise) -> str | None:
    """The starter's surroundings in the exercise's file; where the file is kept that was, None if nothing differed.

    Answers stay, and so does what was added, unless Python cannot read what stands around the answers.
    """
    mine = read(exercise.starter)
    text, _ = _with_our_answers(exercise)
    try:
        mended = _mended(exercise.text, text)
    except SyntaxError:
        mended = exercise.fresh
    result, _ = splice(mended, mine, (), shown(exercise.starter))
    if result == mine:
        return None
    kept = keep(exercise.starter, f"{exercise.starter.parent.name}-{exercise.starter.stem}")
    exercise.starter.write_text(result, encoding="utf-8")
    return str(kept.relative_to(ROOT))


def _with_our_answers(exercise: Exercise) -> tuple[str, list[int]]:
    """The learner's file with our code in all exercises, so that what differs from ours is outside; its lines there."""
    return splice(read(exercise.starter), exercise.text, (), shown(exercise.starter))


def _differences(ours: ast.AST, theirs: ast.AST, owner: str = "") -> Iterator[Difference]:
    have, before = _named(theirs), None
    for name, node in _named(ours).items():
        other = have.get(name)
        if other is None or not isinstance(node, CONTAINERS):
            if other is None or meaning(node) != meaning(other):
                yield Difference(owner + name, node, other, before, theirs)
        else:
            if _head(node) != _head(other):
                yield Difference(owner + name, node, other, before, theirs)
            yield from _differences(
                node, other, f"{owner}{name}." if isinstance(node, ast.ClassDef) else owner
            )
        before = other or before


def _named(owner: ast.AST) -> dict[str, ast.stmt]:
    """What stands in a module, a class or an `if`, by what it is called; of a name's definitions the last.

    An import of several names is as many imports.
    """
    named: dict[str, ast.stmt] = {}
    for node in owner.body:
        match node:
            case ast.Expr(value=ast.Constant()):
                continue  # a docstring
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    one = ast.copy_location(_import_of(node, alias), node)
                    named[ast.unparse(one)] = one
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                is_setter = any(ast.unparse(d).endswith((".setter", ".deleter")) for d in node.decorator_list)
                named[node.name + " =" * is_setter] = node
            case ast.ClassDef():
                named[node.name] = node
            case ast.Assign(targets=targets):
                named[", ".join(map(ast.unparse, targets))] = node
            case ast.AnnAssign(target=target):
                named[ast.unparse(target)] = node
            case ast.If(test=test):
                named[f"if {ast.unparse(test)}"] = node
            case _:
                named[ast.unparse(node).split("\n")[0]] = node
    return named


def _import_of(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.Import | ast.ImportFrom:
    if isinstance(node, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(node.module, [alias], node.level)


def _head(node: ast.ClassDef | ast.If) -> str:
    """The container without what stands in it."""
    if isinstance(node, ast.If):
        return "".join(map(ast.unparse, node.orelse))
    return ast.unparse(ast.ClassDef(node.name, node.bases, node.keywords, [ast.Pass()], node.decorator_list))


def _span(node: ast.stmt) -> tuple[int, int]:
    """Its first line and the line past its last, from 0; of a class and an `if` the lines before the body."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    return first, _span(node.body[0])[0] if isinstance(node, CONTAINERS) else node.end_lineno


def _first_that_differs(one: Difference, ours: list[str], theirs: list[str]) -> int:
    """The first line of the learner's statement, from 1, that is not as ours."""
    (first, stop), (other, end) = _span(one.theirs), _span(one.ours)
    pairs = zip(theirs[first:stop], [*ours[other:end], *[None] * (stop - first)])
    return first + 1 + next((n for n, (mine, their) in enumerate(pairs) if mine != their), 0)


def _mended(sound: str, text: str) -> str:
    """A version of the module in which every difference is as in the sound one. SyntaxError as of `ast.parse`."""
    ours, lines = sound.split("\n"), text.split("\n")
    regions = find_regions(text, "")
    edits: list[tuple[int, int, list[str]]] = []
    for one in _differences(ast.parse(sound), ast.parse(text)):
        if one.theirs is not None:
            first, stop = _span(one.ours)
            edits.append((*_span(one.theirs), ours[first:stop]))
            continue
        first, stop = _span(one.ours)[0], one.ours.end_lineno
        is_import = isinstance(one.ours, ast.Import | ast.ImportFrom)
        column = " " * one.ours.col_offset
        new = [column + ast.unparse(one.ours)] if is_import else ours[first:stop]
        blank = next((n for n in range(first) if ours[first - 1 - n].strip()), 0)
        at = one.after.end_lineno if one.after else _span(_first_of(one.within))[0]
        at = next((r.stop + 1 for r in regions if r.start <= at <= r.stop), at)
        edits.append((at, at, [*[""] * (0 if is_import else blank), *new]))
    for first, stop, new in sorted(edits, key=lambda edit: edit[:2])[::-1]:  # of one place the last first
        lines[first:stop] = new
    return "\n".join(lines)


def _first_of(owner: ast.AST) -> ast.stmt:
    """The first statement that is no docstring and comes from no `__future__`."""
    later = (
        node
        for node in owner.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and getattr(node, "module", None) != "__future__"
    )
    return next(later, owner.body[-1])
