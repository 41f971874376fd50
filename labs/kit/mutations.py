"""Every small change of an exercise's code: mutmut's operators, and some of our own."""

import ast
import random
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

from labs.kit.regions import Exercise

CONVERTERS = {"int", "float", "str", "bool", "list", "tuple", "set", "dict", "sorted", "copy", "reversed"}
CONVERSIONS = {"to", "contiguous", "clone", "copy", "float", "long", "int", "item", "tolist", "clamp"}
WHOLE = (cst.SimpleStatementLine, cst.If, cst.For, cst.While, cst.With, cst.Try)  # statements that can go
NO_CODE = (cst.Annotation, cst.Parameters, cst.Decorator)


class Mutation(NamedTuple):
    """One change.

    function   qualified name of the function that is changed
    old, new   the lines that change, moved to the left; of many that go only the first
    text       the whole module with the change
    """

    exercise: Exercise
    function: str
    old: str
    new: str
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it, wherever its lines are. Changes of like lines in one function have one name."""
        return self.function, self.old, self.new


class _Change(NamedTuple):
    """Not carried out yet: many are looked for, few of them are wanted."""

    function: str
    node: cst.CSTNode
    by: cst.CSTNode


def mutations_of(exercise: Exercise, at_most: int | None = None) -> list[Mutation]:
    """All changes of an exercise's code that differ from it and from each other.

    at_most   so many of them, chosen by the exercise's number: the same in every run
    """
    module = MetadataWrapper(cst.parse_module(exercise.text))
    changes = list(_changes(exercise, module))
    if at_most is not None:
        random.Random(exercise.number).shuffle(changes)
    seen = {ast.dump(ast.parse(exercise.text))}
    made = (_carry_out(exercise, module.module, change) for change in changes)
    found = []
    for function, text in made:
        if (tree := _tree(text)) is None or tree in seen:
            continue
        seen.add(tree)
        found.append(Mutation(exercise, function, *_difference(exercise.text, text), text))
        if len(found) == at_most:
            break
    return found


def _changes(exercise: Exercise, module: MetadataWrapper) -> Iterator[_Change]:
    places = module.resolve(PositionProvider)
    for function, node in _nodes(module.module, ""):
        line = places[node].start.line if node in places else 0
        if not any(region.start < line <= region.stop for region in exercise.regions):
            continue
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                yield from (_Change(function, node, by) for by in operator(node))


def _nodes(node: cst.CSTNode, function: str) -> Iterator[tuple[str, cst.CSTNode]]:
    """Everything in functions' bodies but docstrings and annotations, with the function's qualified name."""
    if isinstance(node, NO_CODE) or _is_docstring(node):
        return
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        yield from _nodes(node.body, f"{function}.{node.name.value}".lstrip("."))
        return
    yield function, node
    for child in node.children:
        yield from _nodes(child, function)


def _is_docstring(node: cst.CSTNode) -> bool:
    if not isinstance(node, cst.SimpleStatementLine):
        return False
    return isinstance(node.body[0], cst.Expr) and isinstance(node.body[0].value, cst.SimpleString)


def _carry_out(exercise: Exercise, module: cst.Module, change: _Change) -> tuple[str, str]:
    return change.function, module.deep_replace(change.node, change.by).code


def _tree(text: str) -> str | None:
    """What Python reads; None where it cannot."""
    try:
        tree = ast.parse(text)
        compile(tree, "mutation", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return ast.dump(tree)


def _difference(text: str, other: str) -> tuple[str, str]:
    """The lines that differ in two texts that are equal before and behind them."""
    lines, others = text.split("\n"), other.split("\n")
    same = _in_common(lines, others)
    lines, others = lines[same:], others[same:]
    behind = _in_common(reversed(lines), reversed(others))
    return _shown(lines[: len(lines) - behind]), _shown(others[: len(others) - behind])


def _in_common(lines: Iterable[str], others: Iterable[str]) -> int:
    """How many lines are the same at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(lines, others)))


def _shown(lines: Sequence[str]) -> str:
    shown = textwrap.dedent("\n".join(lines)).split("\n")
    return "\n".join(shown) if len(shown) < 4 else f"{shown[0]} ... {len(shown) - 1} more lines"


def _once(operator: Callable[[cst.CSTNode], Iterable[cst.CSTNode]]) -> Callable:
    """Its first change alone: what sees one other text sees all."""
    return lambda node: islice(operator(node), 1)


def _deleted(node: cst.BaseStatement) -> Iterator[cst.BaseStatement]:
    if not isinstance(node, cst.SimpleStatementLine) or not isinstance(
        node.body[0], cst.Import | cst.ImportFrom | cst.Pass
    ):
        yield cst.SimpleStatementLine([cst.Pass()], leading_lines=node.leading_lines)


def _decided(node: cst.If | cst.CompIf) -> Iterator[cst.CSTNode]:
    """A condition that always holds, or never."""
    for known in ("True", "False"):
        yield node.with_changes(test=cst.Name(known), whitespace_before_test=cst.SimpleWhitespace(" "))


def _swapped(node: cst.Call) -> Iterator[cst.Call]:
    """Two arguments that follow each other, in each other's place."""
    for i, (one, other) in enumerate(zip(node.args, node.args[1:])):
        if not (one.keyword or other.keyword or one.star or other.star):
            values = {i: other.value, i + 1: one.value}
            args = [a.with_changes(value=values.get(n, a.value)) for n, a in enumerate(node.args)]
            yield node.with_changes(args=args)


def _unconverted(node: cst.Call) -> Iterator[cst.BaseExpression]:
    """What is converted, as it was before."""
    if isinstance(node.func, cst.Attribute) and node.func.attr.value in CONVERSIONS:
        yield node.func.value
    elif isinstance(node.func, cst.Name) and node.func.value in CONVERTERS and len(node.args) == 1:
        yield node.args[0].value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _one_less(node: cst.Integer) -> Iterator[cst.BaseExpression]:
    """mutmut has one more."""
    value = int(node.value, 0) - 1
    yield cst.Integer(str(value)) if value >= 0 else cst.UnaryOperation(cst.Minus(), cst.Integer(str(-value)))


def _off_by_one(node: cst.Slice) -> Iterator[cst.Slice]:
    for name in ("lower", "upper"):
        bound = getattr(node, name)
        if bound is not None and not isinstance(bound, cst.Integer):
            for operator in (cst.Add(), cst.Subtract()):
                left = bound.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
                yield node.with_changes(**{name: cst.BinaryOperation(left, operator, cst.Integer("1"))})


def _caught_too_wide(node: cst.ExceptHandler) -> Iterator[cst.ExceptHandler]:
    for name in ("Exception", "BaseException"):
        if node.type is not None:
            yield node.with_changes(type=cst.Name(name))


OPERATORS: list[tuple[type | tuple[type, ...], Callable]] = [
    *((kind, _once(o) if o is operator_string else o) for kind, o in mutation_operators),
    (WHOLE, _deleted),
    ((cst.If, cst.CompIf), _decided),
    (cst.Call, _swapped),
    (cst.Call, _unconverted),
    (cst.Integer, _one_less),
    (cst.Slice, _off_by_one),
    (cst.ExceptHandler, _caught_too_wide),
]
