"""Who plays in `lab league`: our policies, a learner's exercises, and files.

A file defines some of `admission`, `eviction`, `prefetch` and `routing`: what makes a policy, as the entries of
`minivllm.policies`' tables do. What it does not define is the engine's own.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from labs.kit.judges import Refused
from labs.kit.league import OWN, Maker
from labs.kit.open_exercises import load
from labs.kit.overlay import compile_source, learners_sources
from labs.kit.refusals import check
from labs.kit.regions import LabError
from minivllm.policies import keeping, prefetching, routing, scheduling


@dataclass(frozen=True)
class Entrant:
    """make: the makers of its policies, by kind, made afresh for each traffic; path: its file"""

    name: str
    make: Callable[[], dict[str, Maker]]
    path: Path | None = None


class FirstInFirstOut:
    """The key that came in first leaves, however often it was used since."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.order: dict[int, None] = {}

    def used(self, key: int) -> None:
        self.order.setdefault(key)

    def left(self, key: int) -> None:
        self.order.pop(key, None)

    def victim(self, candidates: Sequence[int]) -> int:
        return next(key for key in self.order if key in candidates)


_KNOWN: dict[str, dict[str, Maker]] = {
    "the engine's own": {},
    "FIFO": {"eviction": FirstInFirstOut},
    "LFU": {"eviction": keeping.POLICIES["lfu"]},
    "GDSF": {"eviction": keeping.POLICIES["gdsf"]},
    "fair": {"admission": scheduling.POLICIES["fair"]},
    "queue": {"prefetch": prefetching.POLICIES["queue"]},
    "hashing": {"routing": routing.POLICIES["hashing"]},
    "bounded hashing": {"routing": routing.POLICIES["bounded-hashing"]},
    "affine": {"routing": routing.POLICIES["affine"]},
}
_KNOWN["GDSF, queue, affine"] = _KNOWN["GDSF"] | _KNOWN["queue"] | _KNOWN["affine"]
OURS = [Entrant(f"ours: {name}", lambda makers=makers: makers) for name, makers in _KNOWN.items()]

# Exercise -> the kind of its policy, its class, and how a maker of that kind makes one.
EXERCISES: dict[str, tuple[str, str, Callable[[Maker], Maker]]] = {
    "10.2": ("eviction", "GreedyDualSizeFrequency", lambda policy: policy),
    "10.3": ("admission", "VirtualTokenCounter", lambda policy: lambda ranks: policy()),
    "10.4": ("prefetch", "ByQueuePosition", lambda policy: policy),
    "10.5": ("routing", "BoundedLoads", lambda policy: lambda seed: policy()),
}


def of_exercise(number: str) -> Entrant:
    """The learner's code for an exercise, with ours for the rest of its module."""
    kind, name, maker = EXERCISES[number]
    [(module, source)] = learners_sources(number).items()

    def make() -> dict[str, Maker]:
        found = ModuleType(module)
        exec(compile(compile_source(source), source.path, "exec", dont_inherit=True), vars(found))
        return {kind: maker(vars(found)[name])}

    return Entrant(f"yours: {number}", make, Path(source.path))


def of_file(path: Path, is_foreign: bool = False) -> Entrant:
    """The policies that a file defines. What is wrong with it is said when it plays.

    is_foreign   it is somebody else's, and refused before it runs if it says what a policy has no need for
    """

    def make() -> dict[str, Maker]:
        text = path.read_text(encoding="utf-8")
        if is_foreign:
            check(text, "", path.name)
            check_imports(text, path.name)
        module = load(text, path)
        found = {kind: getattr(module, kind) for kind in OWN if hasattr(module, kind)}
        if not found:
            raise Refused(f"it defines none of {', '.join(OWN)}")
        return found

    return Entrant(path.stem, make, path)


def check_imports(text: str, where: str) -> None:
    """LabError for the first import from minivllm of anything but policies and what their signatures name."""
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("minivllm") and not name.startswith(("minivllm.policies.", "minivllm.core.")):
                raise LabError(f"{where}:{node.lineno}: the import of {name} is nothing that a policy needs")


def read_submissions(folder: Path) -> list[Entrant]:
    """A file for each learner, by name. LabError where there is none."""
    found = sorted(folder.glob("*.py")) if folder.is_dir() else []
    if not found:
        raise LabError(f"{folder} holds no submissions; put a .py file for each learner there")
    return [of_file(path, is_foreign=True) for path in found]
