"""What a submission may not say: ways out of its function, to the tests and to the machine."""

import ast
from collections.abc import Iterator

from labs.kit.regions import LabError

# Beside what our own module imports.
IMPORTS = {
    *(
        "math",
        "itertools",
        "functools",
        "collections",
        "operator",
        "bisect",
        "heapq",
        "dataclasses",
        "typing",
    ),
    *("re", "copy", "contextlib", "enum", "time", "numpy", "torch", "minivllm", "__future__"),
}
NAMES = {"exec", "eval", "compile", "__import__", "open", "globals", "locals", "vars", "input", "breakpoint"}
NAMES |= {"__builtins__", "__loader__", "__spec__"}
ATTRIBUTES = {"_getframe", "modules", "f_back", "f_globals", "f_locals", "tb_frame", "gi_frame", "cr_frame"}
ATTRIBUTES |= {
    "os",
    "sys",
    "gc",
    "inspect",
    "builtins",
    "importlib",
    "ctypes",
    "subprocess",
    "multiprocessing",
}
DUNDERS = {
    "__init__",
    "__post_init__",
    "__setattr__",
    "__name__",
    "__len__",
    "__iter__",
    "__class__",
    "__enter__",
}
DUNDERS |= {"__exit__", "__getitem__", "__setitem__", "__contains__", "__missing__", "__doc__", "__new__"}


def check(text: str, ours: str, where: str) -> None:
    """LabError names the first line that an answer has no need for.   ours: what our module may"""
    mine, known = ast.parse(text), ast.parse(ours)
    modules = {alias.split(".")[0] for node in ast.walk(known) for alias in _imported(node)}
    calls_of_os = {ast.unparse(node) for node in ast.walk(known) if isinstance(node, ast.Attribute)}
    said = {ast.dump(node) for node in ast.walk(known)}
    bound = {name.asname or name.name.split(".")[0] for n in ast.walk(mine) for name in getattr(n, "names", ())
             if isinstance(n, ast.Import | ast.ImportFrom)}  # fmt: skip
    for node in ast.walk(mine):
        if ast.dump(node) not in said and (what := _refused(node, modules, calls_of_os, bound)):
            raise LabError(f"{where}:{getattr(node, 'lineno', 1)}: {what} is nothing that an answer may use")


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _refused(node: ast.AST, modules: set[str], calls_of_os: set[str], bound: set[str]) -> str | None:
    for name in _imported(node):
        if name.split(".")[0] not in modules | IMPORTS:
            return f"the import of {name}"
    match node:
        case ast.Name(id=name) if name in NAMES:
            return name
        case ast.Attribute(value=ast.Name(id="os")) if ast.unparse(node) not in calls_of_os:
            return ast.unparse(node)
        case ast.Attribute(attr=name) if name in ATTRIBUTES or _is_dunder(name):
            return f".{name}"
        case ast.Constant(value=str(name)) if _is_dunder(name) or name in NAMES | ATTRIBUTES:
            return repr(name)
        case ast.FunctionDef(name=name) | ast.Name(id=name) if _is_dunder(name):
            return name
        case ast.Call(func=ast.Name(id="getattr" | "setattr" | "delattr"), args=[_, key, *_]):
            return None if isinstance(key, ast.Constant) else f"{node.func.id} with a name that is worked out"
        case ast.Attribute(ctx=ast.Store() | ast.Del(), value=value) if _root(value) in bound:
            return f"a change of {ast.unparse(value)}"
    return None


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in DUNDERS


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", None)
