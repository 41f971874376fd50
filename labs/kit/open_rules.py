"""What an answer to an open exercise may use. It keeps to its arguments, so that what is counted is what it did.

The rules close ways round a count, not every way out of Python: who wants to cheat in earnest shall be read.
"""

import ast

MAY_IMPORT = {
    *(
        "bisect",
        "collections",
        "collections.abc",
        "dataclasses",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
    ),
    *("typing", "sortedcontainers", "torch", "triton", "triton.language", "__future__"),
}
# What reaches files, other modules, frames or the names of a module.
FORBIDDEN_NAMES = {
    *(
        "breakpoint",
        "compile",
        "delattr",
        "eval",
        "exec",
        "getattr",
        "globals",
        "input",
        "locals",
        "open",
        "print",
    ),
    *("setattr", "type", "vars", "global"),
}
# Of tensors and torch: data that leaves PyTorch is computed on unseen, and code that is compiled runs unseen.
FORBIDDEN_ATTRIBUTES = {
    *(
        "apply_",
        "as_tensor",
        "builtins",
        "compile",
        "compiler",
        "cpp_extension",
        "ctypes",
        "data_ptr",
        "export",
    ),
    *(
        "from_file",
        "from_numpy",
        "frombuffer",
        "func",
        "gc",
        "hub",
        "inspect",
        "jit",
        "library",
        "load",
        "map_",
    ),
    *(
        "multiprocessing",
        "numpy",
        "ops",
        "os",
        "overrides",
        "profiler",
        "runtime",
        "save",
        "storage",
        "sys",
        "tolist",
    ),
    *("untyped_storage", "utils", "set_printoptions"),
}

OF_KERNELS = ("triton.jit", "tl.load")
# What the names in these mean, or else they would be another module's `jit` and `load`.
KERNEL_MODULES = {"triton": "triton", "tl": "triton.language"}


def broken_rules(text: str) -> list[str]:
    """Sentences about what an answer uses and may not, or about why Python cannot read it."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    return [f"line {node.lineno}: {said}" for node in ast.walk(tree) if (said := _broken_by(node))]


def _broken_by(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return _broken_by_import(node) or _broken_by_new_names(_imported_names(node))
    if said := _broken_by_new_names(_bound_names(node)):
        return said
    if isinstance(node, ast.Name):
        is_hidden = node.id.startswith("__") or node.id in FORBIDDEN_NAMES
        return f"an answer may not use `{node.id}`" if is_hidden else None
    if isinstance(node, ast.Attribute):
        return _broken_by_attribute(node)
    return "an answer may not use `global`" if isinstance(node, ast.Global) else None


def _broken_by_import(node: ast.Import | ast.ImportFrom) -> str | None:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
    names = [] if isinstance(node, ast.Import) else [alias.name for alias in node.names]
    for name in modules:
        if name not in MAY_IMPORT:
            return f"an answer may not import {name}; it may import {', '.join(sorted(MAY_IMPORT))}"
    for name in names:
        if (
            name.startswith(("_", "*"))
            or name in FORBIDDEN_ATTRIBUTES
            or f"{modules[0]}.{name}" == "torch.nn"
        ):
            return f"an answer may not import {name}"
    return None


def _imported_names(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Each name that an import binds, and what it means from then on."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    # `import a.b` binds a, and `import a.b as c` binds c to a.b.
    whole = {alias.asname: alias.name for alias in node.names if alias.asname}
    first = {alias.name.partition(".")[0] for alias in node.names if not alias.asname}
    return whole | {name: name for name in first}


def _bound_names(node: ast.AST) -> dict[str, str]:
    """Each name that anything but an import binds: by assigning, defining, matching, catching or as an argument."""
    if isinstance(node, ast.Name):
        return {} if isinstance(node.ctx, ast.Load) else {node.id: ""}
    fields = () if isinstance(node, ast.keyword | ast.alias) else ("name", "arg", "rest")
    return {name: "" for field in fields if isinstance(name := getattr(node, field, None), str)}


def _broken_by_new_names(names: dict[str, str]) -> str | None:
    for name, means in names.items():
        if KERNEL_MODULES.get(name, means) != means:
            return f"an answer may call nothing `{name}` but {KERNEL_MODULES[name]}"
    return None


def _broken_by_attribute(node: ast.Attribute) -> str | None:
    is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
    if node.attr.startswith("__") or (node.attr.startswith("_") and not is_own):
        return f"an answer may not reach for `{node.attr}`"
    if node.attr in FORBIDDEN_ATTRIBUTES and not is_own and ast.unparse(node) not in OF_KERNELS:
        return f"an answer may not use `.{node.attr}`"
    if not isinstance(node.ctx, ast.Load) and not is_own:
        return f"an answer sets attributes of `self` alone, not `{ast.unparse(node)}`"
    return None
