"""How much code there is: lines that are no docstring, comment or blank line."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(path: Path) -> int:
    """Of a file."""
    return len(_numbers(path.read_text(encoding="utf-8")))


def function_lines(path: Path) -> dict[str, int]:
    """Of every function and method, signature and decorators counted: qualified name -> lines."""
    text = path.read_text(encoding="utf-8")
    numbers = _numbers(text)
    found = {}
    for name, node in _functions(ast.parse(text), ""):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        found[name] = sum(number in numbers for number in range(first, node.end_lineno + 1))
    return found


def _numbers(text: str) -> set[int]:
    """The numbers, from 1, of lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}{getattr(child, 'name', '')}"
        if isinstance(child, FUNCTIONS):
            yield name, child
        inside = f"{name}." if isinstance(child, (*FUNCTIONS, ast.ClassDef)) else prefix
        yield from _functions(child, inside)
