"""Your code in place of ours: the overlay of the course. It stands for nothing in vLLM.

`MINIVLLM_LABS=3,5` makes the modules that phases 3 and 5 are about come from `labs/`, under their real names;
`all` means every phase, and `3.2` one exercise, with our code for the other exercises of its module. An exercise
is one or more regions of a module:

    # region lab 3.2: shrink, one token at a time
    ...
    # endregion
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
STARTERS = ROOT / "labs" / "starters.json"

_OPEN = re.compile(r"\s*# region lab (\d+\.\d+): (\S.*)")
_STUB = re.compile(r'(?:\bTodo\(|static_assert\(False, )"lab (\d+\.\d+): ')


class Todo(NotImplementedError):
    """An exercise that nobody has solved yet was run. Its text is `lab N.M: title`."""


class LabError(ValueError):
    """Something about the labs that its user can put right, in a sentence."""


class Region(NamedTuple):
    """A part of an exercise: lines[start:stop] of its module, the markers around them not included."""

    exercise: str
    title: str
    start: int
    stop: int


def find_regions(text: str, where: str) -> list[Region]:
    """The regions of a module, in order. LabError for markers that do not pair up.

    where   what to call the module in an error
    """
    regions: list[Region] = []
    opened: tuple[str, str, int] | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip().startswith("# region lab"):
            match = _OPEN.fullmatch(line.rstrip())
            if not match:
                raise LabError(f"{where}:{number}: write '# region lab N.M: title', not '{line.strip()}'")
            if opened:
                raise LabError(f"{where}:{number}: the region of lab {opened[0]} is still open here")
            opened = (match[1], match[2], number)
        elif line.strip() == "# endregion":
            if not opened:
                raise LabError(f"{where}:{number}: no region of a lab ends here")
            regions.append(Region(*opened, number - 1))
            opened = None
    if opened:
        raise LabError(f"{where}:{opened[2]}: the region of lab {opened[0]} has no '# endregion'")
    return regions


def unsolved(text: str) -> list[str]:
    """Exercises whose stubs still stand in the text, in order."""
    return list(dict.fromkeys(_STUB.findall(text)))


class Source(NamedTuple):
    """What a module is loaded from.

    path    the file that tracebacks point at
    text    what is compiled
    lines   for each line of `text` the line of the file that stands for it; None = the same
    """

    path: str
    text: str
    lines: list[int] | None = None


def splice(base: str, other: str, keep: Collection[str], where: str) -> tuple[str, list[int]]:
    """The text of `base`, in which `other` has its way in the regions of every exercise but those in `keep`.

    Returns the text and, for each of its lines, the line of `base` it stands for. LabError when the two do not
    have the same regions.
    """
    lines, theirs = base.split("\n"), other.split("\n")
    others = find_regions(other, where)
    try:
        regions = find_regions(base, where)
    except LabError as error:
        raise LabError(f"{error}; {_remedy(lines, theirs, others)}") from None
    if [region.exercise for region in regions] != [region.exercise for region in others]:
        wanted = ", ".join(region.exercise for region in others)
        raise LabError(
            f"{where}: the '# region lab ...' lines must be those of labs {wanted}, in this order; "
            f"{_remedy(lines, theirs, others)}"
        )
    text: list[str] = []
    numbers: list[int] = []
    done = 0
    for mine, their in zip(regions, others):
        if mine.exercise in keep:
            continue
        new = theirs[their.start : their.stop]
        text += lines[done : mine.start] + new
        numbers += range(done + 1, mine.start + 1)
        numbers += (min(mine.start + 1 + i, mine.stop + 1) for i in range(len(new)))
        done = mine.stop
    return "\n".join(text + lines[done:]), [*numbers, *range(done + 1, len(lines) + 1)]


def _remedy(lines: list[str], theirs: list[str], regions: list[Region]) -> str:
    """Which marker to put back and where; what else there is to do.

    lines     the file whose markers are not those of `theirs`, which has these regions
    """
    reset = f"`lab reset {regions[0].exercise.partition('.')[0]}` starts the phase again, and keeps a copy"
    mine = [line.strip() for line in lines]
    for region in regions:
        opening = theirs[region.start - 1].strip()
        if opening not in mine:
            return f"put back the line '{opening}' before '{_first_code(theirs[region.start :])}', or {reset}"
    ends = [n for n, line in enumerate(mine) if line == "# endregion"]
    for region in regions:
        begins = mine.index(theirs[region.start - 1].strip())
        following = next(
            (n for n in range(begins + 1, len(mine)) if mine[n].startswith("# region lab")), len(mine)
        )
        if not any(begins < end < following for end in ends):
            return f"put back the line '# endregion' after the code of lab {region.exercise}, or {reset}"
    return reset


def _first_code(lines: list[str]) -> str:
    return next((line.strip() for line in lines if line.strip() and not line.strip().startswith("#")), "")


def compile_source(source: Source) -> ast.Module:
    """Its syntax tree, with the line numbers of the file. SyntaxError likewise."""
    try:
        tree = ast.parse(source.text, source.path)
    except SyntaxError as error:
        if source.lines and error.lineno:
            error.lineno = error.end_lineno = source.lines[min(error.lineno, len(source.lines)) - 1]
        raise
    for node in ast.walk(tree) if source.lines else ():
        if hasattr(node, "lineno"):
            node.lineno, node.end_lineno = source.lines[node.lineno - 1], source.lines[node.end_lineno - 1]
            # What was several lines may now be one, which ends no earlier than it begins.
            node.end_col_offset = max(node.col_offset, node.end_col_offset)
    return tree


class _Loader(importlib.abc.Loader):
    def __init__(self, source: Source) -> None:
        self.source = source

    def exec_module(self, module: ModuleType) -> None:
        code = compile(compile_source(self.source), self.source.path, "exec", dont_inherit=True)
        exec(code, module.__dict__)


class Overlay(importlib.abc.MetaPathFinder):
    """Loads some modules from other sources than their own. `sources`: module name -> where from."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self.sources.get(name)
        return source and importlib.util.spec_from_file_location(name, source.path, loader=_Loader(source))

    def install(self) -> None:
        """From now on; modules that have been imported stay what they are."""
        for path, text, _ in self.sources.values():
            if not os.path.exists(path):  # Triton and tracebacks read the text of functions from here
                linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
        sys.meta_path.insert(0, self)


def active() -> dict[str, Source]:
    """Modules that come from elsewhere in this process."""
    return {
        name: source
        for finder in sys.meta_path
        if isinstance(finder, Overlay)
        for name, source in finder.sources.items()
    }


def starters() -> dict[str, Path]:
    """Module name -> the learner's file. LabError without a checkout."""
    if not STARTERS.is_file():
        raise LabError(f"the labs need the repository, and there is no {STARTERS}; run this from a checkout")
    listed = json.loads(STARTERS.read_text(encoding="utf-8"))
    return {entry["module"]: STARTERS.parent / name for name, entry in listed.items()}


def engine_file(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def read(path: Path) -> str:
    """The text of a learner's file. LabError when it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        name = path.relative_to(ROOT)
        raise LabError(
            f"{name} is missing; `lab sync` writes a fresh one, git has yours if you committed it"
        ) from None


def learners_sources(selection: str) -> dict[str, Source]:
    """What `MINIVLLM_LABS=selection` loads: module name -> source. LabError for what is no selection.

    A selection that ends in .json is a file: module name -> text. `lab hunt` writes one.
    """
    if selection.endswith(".json"):
        texts = json.loads(read(Path(selection)))
        return {module: Source(f"{engine_file(module)} [hunt]", text) for module, text in texts.items()}
    wanted = {item.strip() for item in selection.split(",")}
    known, sources = {"all"}, {}
    for module, path in starters().items():
        ours = engine_file(module).read_text(encoding="utf-8")
        exercises = {region.exercise for region in find_regions(ours, module)}
        phases = {exercise.partition(".")[0] for exercise in exercises}
        known |= exercises | phases
        if wanted & (phases | {"all"}):
            sources[module] = Source(str(path), read(path))
        elif chosen := wanted & exercises:
            text, lines = splice(read(path), ours, chosen, str(path.relative_to(ROOT)))
            sources[module] = Source(str(path), text, lines)
    if unknown := sorted(wanted - known):
        raise LabError(
            f"MINIVLLM_LABS={selection}: '{unknown[0]}' is not a phase (such as 3), an exercise (such as 3.2) or all"
        )
    return sources


def install_from_environment() -> None:
    """Called first of all. The variable is typed by people: what is wrong with it is said in one sentence."""
    try:
        Overlay(learners_sources(os.environ["MINIVLLM_LABS"])).install()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None


def describe() -> list[str]:
    """One sentence for each module that is the learner's in this process."""
    said = []
    for module, source in active().items():
        left = unsolved(source.text)
        state = f"still TODO: {', '.join(left)}" if left else "nothing left TODO"
        said.append(f"{module} is yours, {os.path.relpath(source.path, ROOT)}; {state}")
    return said
