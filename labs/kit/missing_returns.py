"""Functions of a learner's that end without a value where ours never do: what they give is None."""

import ast
from collections.abc import Iterator
from functools import cache

from labs.kit.overlay import engine_file

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def returning_nothing(module: str, text: str) -> tuple[str, ...]:
    """Names of the functions in a learner's version of a module that may return None, as ours may not.

    () where either version cannot be read.
    """
    try:
        ours = dict(_functions(ast.parse(engine_file(module).read_text(encoding="utf-8"))))
        mine = dict(_functions(ast.parse(text)))
    except (OSError, SyntaxError):
        return ()
    return tuple(
        name
        for name in mine
        if name in ours and _gives_nothing(mine[name]) and not _gives_nothing(ours[name])
    )


def _functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods with their qualified names; not those inside of functions, and no generators."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            if not any(isinstance(n, ast.Yield | ast.YieldFrom) for n in _own(child)):
                yield f"{inside}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{child.name}.")


def _own(function: Function) -> Iterator[ast.AST]:
    """What is in a function and in none that it defines."""
    ahead: list[ast.AST] = list(function.body)
    while ahead:
        node = ahead.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            ahead += ast.iter_child_nodes(node)


def _gives_nothing(function: Function) -> bool:
    """Whether one of its ways out has no value. A `raise` is a way out as well, and so is a stub."""
    returns = [node for node in _own(function) if isinstance(node, ast.Return)]
    is_bare = any(
        r.value is None or (isinstance(r.value, ast.Constant) and r.value.value is None) for r in returns
    )
    return is_bare or _goes_on(function.body)


def _goes_on(body: list[ast.stmt]) -> bool:
    """Whether the line after these statements may be reached."""
    match body[-1]:
        case ast.Return() | ast.Raise() | ast.Continue() | ast.Break():
            return False
        case ast.If(body=yes, orelse=no):
            return not no or _goes_on(yes) or _goes_on(no)
        case ast.With(body=inner) | ast.AsyncWith(body=inner):
            return _goes_on(inner)
        case ast.While(test=ast.Constant(value=True), body=inner):
            return any(isinstance(node, ast.Break) for statement in inner for node in ast.walk(statement))
        case ast.For(orelse=after) | ast.While(orelse=after) if after:
            return _goes_on(after)
        case ast.Try(body=tried, handlers=handlers, orelse=after, finalbody=last):
            if last and not _goes_on(last):
                return False
            return _goes_on(after or tried) or any(_goes_on(handler.body) for handler in handlers)
        case ast.Match(cases=cases):
            is_whole = any(case.guard is None and isinstance(case.pattern, ast.MatchAs) and not case.pattern.pattern
                           for case in cases)  # fmt: skip
            return not is_whole or any(_goes_on(case.body) for case in cases)
    return True
