"""Which modules of a package import one another, and where that goes round in a circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

Graph = dict[str, set[str]]  # module -> the package's modules that it imports


def import_circles(package: Path, annotations: bool = True) -> list[list[str]]:
    """Modules each of which imports all the others of its circle, by way of others or not: sorted names.

    annotations   whether imports under TYPE_CHECKING count

    Imports inside functions count. Parents of what is imported do not, though Python runs them,
    and neither does a module's `__getattr__`, which runs for names that the module does not have.
    """
    return circles_of(import_graph(package, annotations))


def circles_of(graph: Graph) -> list[list[str]]:
    """As `import_circles`."""
    reached = {module: _reached_from(module, graph) for module in graph}
    circles = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
        if module in reached[module]
    }
    return sorted(map(list, circles))


def import_graph(package: Path, annotations: bool = True) -> Graph:
    """Of a folder of modules, which is importable under its own name."""
    paths = {_module_name(path, package): path for path in package.rglob("*.py")}
    return {
        module: _imported(path.read_text(encoding="utf-8"), _parent(module, path), set(paths), annotations)
        for module, path in paths.items()
    }


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parent(module: str, path: Path) -> str:
    """The package that relative imports start from."""
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def _imported(text: str, parent: str, modules: set[str], annotations: bool) -> set[str]:
    found = set()
    for node in _nodes(ast.parse(text), annotations):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = parent.split(".")[: parent.count(".") + 2 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                found.add(name if name in modules else source)
    return found & modules


def _nodes(tree: ast.Module, annotations: bool) -> Iterator[ast.AST]:
    for node in tree.body:
        is_for_annotations = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if getattr(node, "name", "") != "__getattr__" and (annotations or not is_for_annotations):
            yield from ast.walk(node)


def _reached_from(module: str, graph: Graph) -> set[str]:
    """Along at least one import."""
    reached, open_ends = set(), [module]
    while open_ends:
        new = graph[open_ends.pop()] - reached
        reached |= new
        open_ends += new
    return reached
