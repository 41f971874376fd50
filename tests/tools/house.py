"""The house in numbers: import closures, ancestors, and what is changed from outside, by the syntax trees of minivllm.

`python -m tests.tools.house [FOLDER]` prints them, of this checkout or of another one.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The core: what stands alone (docs/architecture.md). Its folders are taken whole.
CORE_FILES = ("config.py", "engine_args.py", "errors.py", "progress.py", "sampling_params.py")
CORE_FOLDERS = ("core", "engine", "layers", "lora", "models", "text", "worker")

ENTRIES = ("engine/llm_engine.py", "worker/model_runner.py", "core/scheduler.py")


def core_files(package: Path = ROOT / "minivllm") -> list[Path]:
    """All files of the core."""
    of_folders = (path for folder in CORE_FOLDERS for path in sorted((package / folder).rglob("*.py")))
    return [*(package / name for name in CORE_FILES if (package / name).is_file()), *of_folders]


class House:
    """The syntax trees of a package.   package: its folder"""

    def __init__(self, package: Path = ROOT / "minivllm") -> None:
        self.package = package
        texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
        self.lines = {path: text.count("\n") for path, text in texts.items()}
        self.trees = {path: ast.parse(text) for path, text in texts.items()}
        self.modules = {self._module_of(path): path for path in texts}
        self.classes = {
            node.name: node
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    def _module_of(self, path: Path) -> str:
        parts = path.relative_to(self.package.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.package).as_posix()

    # ---- imports ----------------------------------------------------------------------------------------------

    def imports(self, path: Path) -> set[Path]:
        """What a file imports: in functions and for annotations, too, and the packages' `__init__` that Python runs.

        The package's own `__init__` is lazy: it names everything and imports nothing.
        """
        if path == self.package / "__init__.py":
            return set()
        names: set[str] = set()
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    parent = self._module_of(path).split(".")
                    parent = parent[: len(parent) - node.level + (path.name == "__init__.py")]
                    module = ".".join([*parent, module] if module else parent)
                names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        found = {name for name in names if name in self.modules}
        found |= {name.rsplit(".", n)[0] for name in found for n in range(1, name.count(".") + 1)}
        return {self.modules[name] for name in found}

    def closure(self, *starts: Path) -> set[Path]:
        """These files and whatever they import, directly or by way of others."""
        seen, todo = set(), list(starts)
        todo += [self.package / "__init__.py"]
        while todo:
            path = todo.pop()
            if path not in seen:
                seen.add(path)
                todo += self.imports(path)
        return seen - {self.package / "__init__.py"}

    # ---- changes from outside ---------------------------------------------------------------------------------

    def replaced_methods(self) -> list[str]:
        """Assignments to an attribute of somebody else's object whose name is a method's, and no field's, here."""
        methods, fields = set(), set()
        for node in self.classes.values():
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    is_property = any("property" in ast.unparse(d) for d in inner.decorator_list)
                    (fields if is_property else methods).add(inner.name)
                for target in _targets(inner):
                    fields.add(
                        target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
                    )
        return [
            self._place(path, target)
            for path, target in self._attributes_set()
            if ast.unparse(target.value) not in ("self", "cls") and target.attr in methods - fields
        ]

    def set_from_outside(self) -> list[str]:
        """Attributes put on classes, by `setattr`, or through `__dict__` and `__path__`."""
        found = [
            self._place(path, target)
            for path, target in self._attributes_set()
            if isinstance(target.value, ast.Name) and target.value.id in self.classes
        ]
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                is_setattr = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
                if is_setattr or (isinstance(node, ast.Attribute) and node.attr in ("__path__", "__dict__")):
                    found.append(self._place(path, node))
        return found

    def _attributes_set(self) -> Iterator[tuple[Path, ast.Attribute]]:
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                yield from ((path, target) for target in _targets(node) if isinstance(target, ast.Attribute))

    def _place(self, path: Path, node: ast.AST) -> str:
        return f"{self.name_of(path)}:{node.lineno} {ast.unparse(node)[:70]}"

    def module_getattrs(self) -> list[str]:
        """Modules with a `__getattr__` of their own."""
        return [
            self.name_of(path)
            for path, tree in self.trees.items()
            if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
        ]

    def ancestors(self, name: str) -> set[str]:
        """Classes of the package that a class inherits from, directly or by way of others."""
        found: set[str] = set()
        todo = [name]
        while todo:
            for base in self.classes[todo.pop()].bases:
                base_name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
                if base_name in self.classes and base_name not in found:
                    found.add(base_name)
                    todo.append(base_name)
        return found - {name}


def _targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.Assign):
        return [t for target in node.targets for t in getattr(target, "elts", [target])]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def table(house: House) -> dict[str, object]:
    """All numbers, as plain values."""
    size = lambda paths: [len(paths), sum(house.lines[path] for path in paths)]  # noqa: E731
    starts = {name: house.package / name for name in ENTRIES}
    folders = {name: sorted((house.package / name).rglob("*.py")) for name in CORE_FOLDERS}
    deepest = sorted(((len(house.ancestors(name)), name) for name in house.classes), reverse=True)
    return {
        "package": size(house.lines),
        "core": size(core_files(house.package)),
        "closures": {name: size(house.closure(path)) for name, path in starts.items() if path in house.trees},
        "closures of folders": {
            name: size(house.closure(*paths)) for name, paths in folders.items() if paths
        },
        "methods replaced": house.replaced_methods(),
        "set from outside": house.set_from_outside(),
        "modules with __getattr__": house.module_getattrs(),
        "most ancestors": deepest[:8],
    }


Graph = dict[str, set[str]]  # module -> the package's modules that it imports


def circles_of(graph: Graph) -> list[list[str]]:
    """Modules each of which imports all the others of its circle, by way of others or not: sorted names."""
    reached = {module: _reached_from(module, graph) for module in graph}
    circles = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
        if module in reached[module]
    }
    return sorted(map(list, circles))


def import_graph(package: Path, annotations: bool = True) -> Graph:
    """Of a folder of modules, which is importable under its own name.

    annotations   whether imports under TYPE_CHECKING count

    Imports inside functions count. Parents of what is imported do not, though Python runs them,
    and neither does a module's `__getattr__`, which runs for names that the module does not have.
    """
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


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if sys.argv[1:] else ROOT
    for what, numbers in table(House(checkout.resolve() / "minivllm")).items():
        print(f"{what}: {json.dumps(numbers, indent=2 if isinstance(numbers, dict) else None)}")
