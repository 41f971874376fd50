"""Learners' code in place of the engine's: modules that are loaded from `labs/` under their real names.

`MINIVLLM_LABS=3,5` makes the modules that phases 3 and 5 are about come from `labs/`; `all` means every phase, and
`3.2` one exercise, with the engine's code for the other exercises of its module.

A process that runs learners' code installs the overlay before it imports minivllm. `lab run`, `lab notebook` and all
else that starts one gives it the variables of `environment`: minivllm imports `labs.kit.startup` first, since
MINIVLLM_PLUGINS names it, and so do the processes that it starts itself (engines, ranks), which inherit them. pytest
imports it in tests/conftest.py, so that `MINIVLLM_LABS=3 pytest` suffices.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NamedTuple

from labs.kit.regions import ROOT, LabError, find_regions, splice, unsolved

STARTERS = ROOT / "labs" / "starters.json"
STARTUP = "labs.kit.startup"


class Todo(NotImplementedError):
    """An exercise that nobody has solved yet was run. Its text is `lab N.M: title`."""


class Source(NamedTuple):
    """What a module is loaded from.

    path    the file that tracebacks point at
    text    what is compiled
    lines   for each line of `text` the line of the file that stands for it; None = the same
    """

    path: str
    text: str
    lines: list[int] | None = None


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


def environment(selection: str) -> dict[str, str]:
    """The variables with which a process, and those that it starts, run learners' code.

    selection   as for `learners_sources`; "" = the engine's code alone
    """
    others = [name for name in os.environ.get("MINIVLLM_PLUGINS", "").split(",") if name and name != STARTUP]
    plugins = [STARTUP, *others] if selection else others
    return {"MINIVLLM_LABS": selection, "MINIVLLM_PLUGINS": ",".join(plugins)}


def install_from_environment() -> None:
    """What MINIVLLM_LABS selects, here and in processes started from here; nothing where it is not set.

    The variable is typed by people, so what is wrong with it is said in a sentence. So is, where it ends the program,
    what is unsolved in a learner's code or no Python.
    """
    selection = os.environ.get("MINIVLLM_LABS", "")
    if not selection:
        return
    try:
        Overlay(learners_sources(selection)).install()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
    os.environ.update(environment(selection))
    sys.excepthook = _end_of_program


def _end_of_program(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For `sys.excepthook`: an exercise that nobody has solved needs no traceback."""
    if isinstance(error, Todo):
        print(f"error: {error} is still TODO", file=sys.stderr)
    elif isinstance(error, SyntaxError) and error.filename in {source.path for source in active().values()}:
        print(f"error: {error.filename}:{error.lineno}: {error.msg}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def describe(selection: str) -> list[str]:
    """One sentence for each module that is the learner's. LabError for what is no selection."""
    said = []
    for module, source in learners_sources(selection).items() if selection else ():
        left = unsolved(source.text)
        state = f"still TODO: {', '.join(left)}" if left else "nothing left TODO"
        said.append(f"{module} is yours, {os.path.relpath(source.path, ROOT)}; {state}")
    return said
