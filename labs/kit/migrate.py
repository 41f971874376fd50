"""`lab migrate`: what learners wrote in starters of an earlier release, carried to where its exercise is now.

Bodies are carried, and what learners put beside them in a region; signatures and docstrings are today's. A file that
holds somebody's work is kept whole under `old/`, whatever was carried: nothing is lost. So that nobody's work is
taken for ours, nor ours for theirs, `labs/released.json` lists the hashes of all parts of the starters of releases.
"""

import ast
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from labs.kit.regions import (
    ROOT,
    Exercise,
    Function,
    LabError,
    Region,
    code_of,
    definitions_in,
    find_regions,
    functions_in,
    read_engine,
    splice,
    unsolved,
)
from labs.kit.sync import sha256

_MARKER = re.compile(r"^\s*# region lab (\d+\.\d+): ", re.MULTILINE)
# What stands around exercises and had another name in the last release: answers use it.
RENAMED = {
    "_matrices": "matrices",
    "_timed_load": "_load",
    "_unsupported": "unsupported",
    "_widest_dtype": "widest_dtype",
    "_write": "write_slot",
    "as_fault": "recoverable",
    "is_fault": "is_recoverable",
    "may_run": "why_wait",
    "put_down_to": "blamed_on",
}
# What learners' tests of hunts and their copies of notebooks begin with, which have no frame of ours around them.
IMPORTS = {
    "from minivllm.labs import ROOT": "from labs.kit.regions import ROOT",
    "from minivllm.labs import Todo": "from labs.kit.overlay import Todo",
    "from hunting import": "from tests.worlds.hunts import",
    'pytest_plugins = "hunt_world"': 'pytest_plugins = "tests.worlds.hunts"',
}
_IMPORTED = re.compile(r"\b(?:from|import) (minivllm(?:\.\w+)+)")
# What moved into an object that an exercise's own object has: number -> regular expression -> replacement.
_TABLES = {
    r"self\._active_adapters\b": "self.tiers.slots",
    r"self\._registered_adapters\b": "self.tiers.memory",
}
MOVED = {
    "5.2": {**_TABLES, r"self\._find_slot\b": "self.tiers.find_slot"},
    "5.3": _TABLES,
    "5.4": {
        r"self\._active_adapters\b": "self.slots",
        r"self\._registered_adapters\b": "self.memory",
        r"self\.list_adapters\(\)": "dict(self.memory)",
        r"self\.list_active_adapters\(\)": "dict(self.slots)",
        r"len\(self\)": "len(self.memory)",
        r"\b_find_slot\b": "find_slot",
        r"\b_make_room_in_memory\b": "make_room_in_memory",
        r"self\.pinned_adapters\b": "self.pinned",
    },
    "5.5": _TABLES,
    "5.6": {**_TABLES, r"self\._stage\b": "self.stage"},
    "5.7": {r"self\.manager\.in_use = (.+)": r"self.manager.set_in_use(\1)"},
    "5.8": {r"self\._timed_load\b": "self._load"},
    "7.5": {
        r"self\.scheduler\.(requests|waiting|running|in_flight)\b": r"self.queues.\1",
        r"\border\b": "reload",
    },
    "11.2": {r"\bself\.base_layer\.complete\((\w+)\)": r"\1"},  # the block sums terms
}
# What stood around the answer to an exercise that begins with a blank page now, and comes along with it: the answer
# takes the place of ANSWER.
_ANSWER = "    ANSWER"
AROUND = {
    "6.1": """
class LoRASlots:
    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.pinned: set[int] = set()
        self.num_running: Counter[int] = Counter()
        self.taken: set[int] = set()

    ANSWER

    def holders(self) -> set[int]:
        return set(self.taken)

    def evictable(self) -> dict[int, int]:
        return {a: n for a, n in self.num_running.items() if a not in self.pinned}

    def lose(self, adapter_id: int) -> None:
        del self.num_running[adapter_id]
        self.taken.remove(adapter_id)
"""
}
_TORN = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.MULTILINE)


def strays(root: Path = ROOT) -> list[Path]:
    """Learners' files of an earlier release: an exercise is gone or lives elsewhere, or all around it is old."""
    index = root / "labs" / "starters.json"
    if not index.is_file():
        return []
    ours = {entry["sha256"] for entry in json.loads(index.read_text(encoding="utf-8")).values()}
    texts = {path: path.read_text("utf-8", "replace") for path in _files(root)}
    changed = {path: text for path, text in texts.items() if sha256(text) not in ours}
    exercises, known = read_engine(root), _released(root)
    homes = {_home(exercise, root): exercise for exercise in exercises.values()}
    return [path for path, text in changed.items() if _is_old(text, homes.get(path), known)]


def _is_old(text: str, exercise: Exercise | None, known: set[str]) -> bool:
    """Whether a changed file is an earlier release's.   exercise: any of those that live there today"""
    numbers = _MARKER.findall(text)
    if not exercise:
        return bool(numbers)
    try:
        fresh = exercise.fresh
        if set(numbers) - set(_MARKER.findall(fresh)):
            return True
        frame = _frame(text, exercise.module)
    except LabError:  # `lab check` says so
        return False
    return sha256(frame) in known and frame != _frame(fresh, exercise.module)


def migrate(root: Path = ROOT) -> list[str]:
    """Carry all that can be; sentences about what was done, and about what was not and why."""
    migration = _Migration(root)
    migration.plan()
    migration.write()
    return migration.said


def record_release(root: Path = ROOT) -> None:
    """For maintainers: remember the starters of today as those of a release."""
    known = _released(root).union(*(_hashes(text, path.name) for path, text in _fresh(root).items()))
    (root / "labs" / "released.json").write_text(json.dumps(sorted(known), indent=0) + "\n", encoding="utf-8")


def unreleased(root: Path = ROOT) -> list[str]:
    """Starters of today that no release is known to have: whoever has them, `lab migrate` takes them for own work."""
    known = _released(root)
    return [
        path.relative_to(root).as_posix()
        for path, text in _fresh(root).items()
        if not _hashes(text, path.name) <= known
    ]


def _fresh(root: Path) -> dict[Path, str]:
    """Every starter's file, and its text as it belongs there today."""
    return {_home(exercise, root): exercise.fresh for exercise in read_engine(root).values()}


class _Migration:
    """Nothing is written before `write`.

    fresh    file -> the starter that belongs there now
    texts    file -> what will be there; learners' files of today stay as they are
    kept     files of an earlier release with somebody's work -> sentences about it
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.exercises = read_engine(root)
        self.fresh = _fresh(root)
        self.known = _released(root)
        self.texts: dict[Path, str] = {}
        self.kept: dict[Path, list[str]] = {}
        self.removed: list[Path] = []
        self.said: list[str] = []

    def plan(self) -> None:
        found = {path: path.read_text(encoding="utf-8") for path in _files(self.root)}
        states = {path: self._state(path, text) for path, text in found.items()}
        for path, fresh in self.fresh.items():
            state = states.get(path, "old")
            if state != "torn":
                self.texts[path] = fresh if state == "old" else found[path]
        for path in [path for path, state in states.items() if state == "old"]:
            self._carry_all(path, found[path])
        hunts, notebooks = self.root.glob("labs/08_*/test_*.py"), self.root.glob("notebooks/*.ipynb")
        for path in sorted([*hunts, *notebooks]):
            self._renew_imports(path, path.read_text(encoding="utf-8"))

    def _renew_imports(self, path: Path, text: str) -> None:
        renewed = text
        for old, new in IMPORTS.items():
            renewed = renewed.replace(old, new)
        if renewed != text:
            self.texts[path] = renewed
            self.said.append(f"{self._shown(path)}: what it imports from minivllm.labs is in labs.kit now")
        if path.suffix == ".ipynb" and (gone := self._gone(renewed)):
            self.said.append(
                f"{self._shown(path)}: {gone[0]}, which it imports, is not there any more; "
                f"`lab notebook {int(path.stem[:2])} --fresh` starts it over and keeps this one"
            )

    def _gone(self, text: str) -> list[str]:
        """Modules of the engine that are imported and have no file."""
        files = {name: self.root.joinpath(*name.split(".")) for name in _IMPORTED.findall(text)}
        return [
            name
            for name, path in files.items()
            if not path.is_dir() and not path.with_suffix(".py").is_file()
        ]

    def _state(self, path: Path, text: str) -> str:
        """old: of an earlier release; torn: nobody can tell; mine: all else, which is left alone"""
        fresh, name = self.fresh.get(path), self._shown(path)
        numbers = _MARKER.findall(text)
        if not fresh and not numbers:
            return "mine"
        try:
            if _TORN.search(text):
                raise LabError(f"{name} holds both sides of a merge that git could not finish")
            frame = _frame(text, name)
        except LabError as error:
            self.said.append(f"{error}; put it right, then run `lab migrate` again")
            return "torn"
        if fresh and frame == _frame(fresh, name):
            return "mine"
        if not fresh or sha256(frame) in self.known or numbers != _MARKER.findall(fresh):
            return "old"
        self.said.append(f"{name} has changes outside its regions: it is left as it is")
        return "mine"

    def _carry_all(self, path: Path, text: str) -> None:
        name = self._shown(path)
        work = [] if sha256(_frame(text, name)) in self.known else ["it has changes outside its regions"]
        for number in dict.fromkeys(_MARKER.findall(text)):
            code = code_of(text, number, name)
            if sha256(code) in self.known or self._is_stub(number, code):
                continue
            try:
                home = self._carry(number, code)
                work.append(f"lab {number} is carried to {self._shown(home)}")
            except LabError as error:
                work.append(f"lab {number} was not carried: {error}")
        if work:
            self.kept[path] = work
        self.removed += [path] * (path not in self.fresh)

    def _is_stub(self, number: str, code: str) -> bool:
        exercise = self.exercises.get(number)
        return exercise is not None and code == code_of(self._stubs(exercise), number, exercise.module)

    def _stubs(self, exercise: Exercise) -> str:
        return self.fresh[_home(exercise, self.root)]

    def _carry(self, number: str, code: str) -> Path:
        """Put a learner's code into the file of its exercise; which file that is. LabError says why it cannot be."""
        exercise = self.exercises.get(number)
        if exercise is None:
            raise LabError("there is no such exercise any more")
        home, fresh = _home(exercise, self.root), self._stubs(exercise)
        name = self._shown(home)
        if home not in self.texts:
            raise LabError(f"{name} must be put right first")
        if not self._is_stub(number, code_of(self.texts[home], number, name)):
            raise LabError(f"{name} holds an answer of yours already")
        others = self.exercises.keys() - {number}
        filled = transplant(code, fresh, number, exercise.is_blank)
        self.texts[home] = splice(self.texts[home], filled, others, name)[0]
        return home

    def write(self) -> None:
        """What is kept first."""
        for path, work in self.kept.items():
            copy = _free(path.parent / "old" / path.name)
            copy.parent.mkdir(exist_ok=True)
            head = "".join(f"# lab migrate: {sentence}\n" for sentence in work)
            copy.write_text(head + path.read_text(encoding="utf-8"), encoding="utf-8")
            self.said += [f"{self._shown(path)}: {sentence}" for sentence in work]
            self.said.append(f"{self._shown(path)} is kept as {self._shown(copy)}")
        for path, text in self.texts.items():
            path.parent.mkdir(exist_ok=True)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
        for path in self.removed:
            path.unlink()
            if path not in self.kept:
                self.said.append(f"{self._shown(path)} is removed: nobody had written in it")

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.root))


def transplant(code: str, fresh: str, number: str, is_blank: bool = False) -> str:
    """A starter in which the functions of an exercise have the bodies that they have in a learner's region.

    code       the region as `code_of` gives it
    is_blank   the region is the learner's as a whole: it is carried as it stands

    What else the learner put there comes before them. LabError when the functions are not the same.
    """
    tree, lines = ast.parse(fresh), fresh.split("\n")
    regions = [region for region in find_regions(fresh, number) if region.exercise == number]
    wanted = [function for region in regions for function in functions_in(tree, region)]
    if not wanted:
        raise LabError("it is part of a function; copy it by hand")
    if is_blank:
        return _on_blank_page(_with_todays_names(code, number), tree, lines, regions[0])
    code = _with_todays_names(code, number)
    mine = _parsed(code)
    answers = _by_signature(defined(mine))
    names = {function.name for function in answers.values()}
    for key, function in reversed(_by_signature(wanted).items()):
        answer = answers.get(key)
        if answer is None:
            known = "takes other arguments" if function.name in names else "is not in it"
            raise LabError(f"{function.name} {known} now")
        stub, body = _first(function), _body(answer, code.split("\n"), ours=lines)
        indented = textwrap.indent(body, " " * stub.col_offset)
        lines[stub.lineno - 1 : function.end_lineno] = indented.split("\n")
    if extras := "\n\n".join(_extras(mine, tree, code.split("\n"))):
        indented = textwrap.indent(extras, " " * wanted[0].col_offset)
        lines[regions[0].start : regions[0].start] = [*indented.split("\n"), ""]
    return "\n".join(lines)


def _with_todays_names(code: str, number: str) -> str:
    code = re.sub(r"\b\w+\b", lambda word: RENAMED.get(word[0], word[0]), code)
    for before, now in MOVED.get(number, {}).items():
        code = re.sub(before, now, code)
    return code


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError as error:
        raise LabError(f"it does not parse, {error.msg}") from None


def _named(name: str, code: str) -> Function | ast.ClassDef | None:
    """The function or class of that name; of several the last, which is the one that counts."""
    found = (node for node in reversed(_parsed(code).body) if isinstance(node, Function | ast.ClassDef))
    return next((node for node in found if node.name == name), None)


def _on_blank_page(code: str, fresh: ast.Module, lines: list[str], region: Region) -> str:
    """The starter with the code as the region's. LabError when it has not what the engine calls."""
    (called,) = definitions_in(fresh, region)
    mine = _named(called.name, code)
    if mine is None and region.exercise in AROUND:
        code = AROUND[region.exercise].replace(_ANSWER, textwrap.indent(code.strip("\n"), "    "))
        mine = _named(called.name, code)
    if mine is None or type(mine) is not type(called):
        raise LabError(f"{called.name} is not in it now")
    if isinstance(called, Function) and _signature(mine) != _signature(called):
        raise LabError(f"{called.name} takes other arguments now")
    indented = textwrap.indent(code.strip("\n"), " " * called.col_offset).split("\n")
    page = lines[region.start : region.stop]
    first = next(n for n, line in enumerate(page) if line.strip())
    last = next(n for n, line in enumerate(reversed(page)) if line.strip())
    lines[region.start : region.stop] = [*page[:first], *indented, *page[len(page) - last :]]
    return "\n".join(lines)


def _by_signature(functions: Iterable[Function]) -> dict[tuple[str, int], Function]:
    """Functions by what makes them the same, and which it is of several such: two classes may have a method each."""
    seen: Counter[str] = Counter()
    found = {}
    for function in functions:
        signature = _signature(function)
        found[signature, seen[signature]] = function
        seen[signature] += 1
    return found


def _signature(function: Function) -> str:
    """What makes it the same function: decorators, name, parameters; not their annotations and defaults."""
    a = function.args
    groups = [[p.arg for p in group] for group in (a.posonlyargs, a.args, a.kwonlyargs)]
    rest = [p and p.arg for p in (a.vararg, a.kwarg)]
    return str(([ast.unparse(d) for d in function.decorator_list], function.name, groups, rest))


def defined(node: ast.AST) -> Iterator[Function]:
    """Functions and methods that are not part of another function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child
        elif isinstance(child, ast.ClassDef):
            yield from defined(child)


def _first(function: Function) -> ast.stmt:
    """What its body begins with behind the docstring. LabError if that is nothing."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        raise LabError(f"{function.name} has no body")
    return body[0]


def _body(function: Function, lines: list[str], ours: list[str]) -> str:
    """Its lines behind the docstring, moved to the left, with comments before and after that are not ours."""
    begin = _first(function)
    start, stop = begin.lineno - 1, function.end_lineno
    if lines[start][: begin.col_offset].strip():
        raise LabError(f"the body of {function.name} begins on the line of its signature")
    is_comment = re.compile(rf" {{{function.col_offset + 1},}}#").match
    while stop < len(lines) and is_comment(lines[stop]):
        stop += 1
    before = []
    while is_comment(lines[start - 1 - len(before)]):
        before.insert(0, lines[start - 1 - len(before)])
    known = {line.strip() for line in ours}
    before = [line for line in before if line.strip() not in known]
    return textwrap.dedent("\n".join(before + lines[start:stop]))


def _extras(mine: ast.Module, fresh: ast.Module, lines: list[str]) -> Iterator[str]:
    """What a learner's region has beside the exercise's functions and is nowhere in the starter."""
    names = {getattr(node, "name", None) for node in ast.walk(fresh)} - {None}
    there = {ast.dump(node) for node in ast.walk(fresh) if isinstance(node, ast.stmt)}
    for node in mine.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
        text = "\n".join(lines[first : node.end_lineno])
        if getattr(node, "name", None) not in names and ast.dump(node) not in there and not unsolved(text):
            yield text


def _frame(text: str, where: str) -> str:
    """All but what is in regions."""
    lines = text.split("\n")
    for region in reversed(find_regions(text, where)):
        del lines[region.start : region.stop]
    return "\n".join(lines)


def _hashes(text: str, where: str) -> set[str]:
    """Of the parts of a starter: its frame, and the code of each exercise."""
    return {sha256(_frame(text, where))} | {sha256(code_of(text, n, where)) for n in _MARKER.findall(text)}


def _released(root: Path) -> set[str]:
    path = root / "labs" / "released.json"
    return set(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else set()


def _files(root: Path) -> list[Path]:
    return sorted((root / "labs").glob("[01]*/*.py"))


def _home(exercise: Exercise, root: Path) -> Path:
    return root / exercise.starter.relative_to(ROOT)


def _free(path: Path) -> Path:
    """The path, or one like it where no file is."""
    tries = (path.with_stem(f"{path.stem}-{n}") if n > 1 else path for n in range(1, 1000))
    return next(path for path in tries if not path.exists())
