"""What a hunt's test may not do: read how the engine is written. A right test sees what the engine does.

A test that compares source or bytecode fails on the broken engine and on its variants, as a right one does, but it says
nothing of behaviour: it fails on a sound engine that is written otherwise, and passes on the next form of the mistake.
"""

import ast
import re
from collections.abc import Iterator

MODULES = {"ast", "dis", "linecache", "marshal", "pkgutil", "symtable", "tokenize", "importlib.resources"}
MODULES |= {"importlib.machinery", "importlib.util", "zipimport"}
# Of inspect what gives text or files; `inspect.signature` asks for what a caller may know.
OF_INSPECT = {
    "findsource",
    "getblock",
    "getcomments",
    "getfile",
    "getsource",
    "getsourcefile",
    "getsourcelines",
}
ATTRIBUTES = OF_INSPECT | {
    "__cached__",
    "__code__",
    "__file__",
    "__loader__",
    "__spec__",
    "f_code",
    "get_source",
}
# All that a test may use of labs/, which knows where sources are, and which of them are another engine's.
OF_LABS = "labs.kit.overlay.Todo"
_FILE_OF_ENGINE = re.compile(r"\bminivllm[\\/]|\.pyc?$")


def source_reading(text: str) -> tuple[int, str] | None:
    """(line, what is done there) of the first place where a test reads source; None if there is none.

    A file that Python cannot read has none: it fails on the sound engine, with its error.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = ((n.lineno, what) for n in ast.walk(tree) if id(n) not in prose and (what := _reads(n)))
    return min(found, default=None)


def _reads(node: ast.AST) -> str | None:
    for name in _imported(node):
        parts = name.split(".")
        if any(".".join(parts[: n + 1]) in MODULES for n in range(len(parts))):
            return f"the import of {name}"
        if parts[:1] == ["inspect"] and parts[-1] in OF_INSPECT:
            return f"the import of {name}"
        if parts[0] == "labs" and name != OF_LABS:
            return f"the import of {name}"
    match node:
        case ast.Attribute(attr=name) if name in ATTRIBUTES or name.startswith("co_"):
            return f".{name}"
        case ast.Constant(value=str(name)) if name in ATTRIBUTES or name.startswith("co_"):
            return repr(name)
        case ast.Constant(value=str(name)) if _FILE_OF_ENGINE.search(name):
            return f"the file {name!r}"
        case ast.Call(
            func=ast.Name("__import__") | ast.Attribute(attr="import_module"), args=[ast.Constant(name), *_]
        ):
            if name in MODULES | {"inspect"} or str(name).partition(".")[0] == "labs":
                return f"the import of {name}"
        case ast.Name(id="eval" | "exec" | "compile" as name):
            return name
    return None


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
