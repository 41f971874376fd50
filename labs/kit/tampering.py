"""Whether somebody's code has put other functions in the place of those that judge it."""

import ast
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

from labs.kit.regions import ROOT

WATCHED = (
    "builtins",
    "pytest",
    "_pytest",
    "pluggy",
    "math",
    "json",
    "torch.testing",
    "numpy.testing",
    "labs.kit",
)
WATCHED_ALONE = ("torch", "torch._tensor", "multiprocessing.connection", "numpy")
OF_TESTS = f"{ROOT / 'tests'}{os.sep}"
BY_PYTEST = ("_pytest.config.Config", "_getini_unknown_type")  # its own plugin puts another one there
FUNCTIONS = (FunctionType, BuiltinFunctionType, type, classmethod, staticmethod, property)

Judges = dict[tuple[str, str], object]


def judges() -> Judges:
    """(module or class, name) -> the function or class that stands there now, of all that is watched."""
    found: Judges = {}
    for name, module in list(sys.modules.items()):
        if name in WATCHED_ALONE or name.startswith(WATCHED):
            found |= {(name, key): value for key, value in _functions(vars(module))}
            for owner in [v for _, v in _functions(vars(module)) if isinstance(v, type)]:
                if owner.__module__ == name:
                    found |= {(f"{name}.{owner.__name__}", k): v for k, v in _functions(vars(owner))}
    return found


def replaced(before: Judges) -> list[str]:
    """What is another thing than before, and what of the tests' own functions is not from their file."""
    now = judges()
    now[BY_PYTEST] = before.get(BY_PYTEST)
    others = [".".join(place) for place, judge in before.items() if now.get(place) is not judge]
    return others + [name for module in list(sys.modules.values()) for name in _foreign(module)]


def _functions(namespace: dict[str, object]) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in list(namespace.items()) if isinstance(value, FUNCTIONS))


def _foreign(module: ModuleType) -> Iterator[str]:
    file = getattr(module, "__file__", None)
    if not file or not file.startswith(OF_TESTS):  # asked of thousands of modules after each test
        return
    for name in _defined(file):
        value = getattr(module, name, None)
        if not isinstance(value, FunctionType) or value.__code__.co_filename != file:
            yield f"{module.__name__}.{name}"


@cache
def _defined(file: str) -> tuple[str, ...]:
    """Functions that stand in a file, without a decorator: those are what the file says."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return tuple(n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.decorator_list)
