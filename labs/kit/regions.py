"""Regions of the engine's source: the exercises they make up, the stubs that stand for them, edits inside them.

An exercise is one or more regions of a module:

    # region lab 3.2: shrink, one token at a time
    ...
    # endregion
"""

import ast
import json
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

PHASES = (
    "00_one_file",
    "01_request_and_weights",
    "02_lora_layers",
    "03_cpu_punica",
    "04_triton_sgmv",
    "05_slot_manager",
    "06_max_loras_scheduler",
    "07_engine",
    "09_serving",
    "10_many_adapters",
    "11_many_gpus",
    "12_variants",
    "13_adapters_that_learn",
)

SOURCES = ("minivllm", "phases/00_one_file")  # folders of the files in which exercises are

Function = ast.FunctionDef | ast.AsyncFunctionDef

_OPEN = re.compile(r"\s*# region lab (\d+\.\d+): (\S.*)")
_STUB = re.compile(r'(?:\bTodo\(|static_assert\(False, )"lab (\d+\.\d+): ')


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
        if "region" not in line:
            continue
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


@dataclass
class Exercise:
    """number: such as `3.2`; text: of the whole module, as the engine has it; recipes: see `read_recipes`

    blanks   see `read_blanks`
    """

    number: str
    module: str
    text: str
    regions: list[Region] = field(default_factory=list)
    recipes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    blanks: Collection[str] = ()

    @property
    def phase(self) -> str:
        return named_phase(self.number)

    @property
    def title(self) -> str:
        return "; ".join(dict.fromkeys(region.title for region in self.regions))

    @property
    def starter(self) -> Path:
        return ROOT / "labs" / self.phase / (self.module.rpartition(".")[2] + ".py")

    @property
    def fresh(self) -> str:
        """The text that a learner begins with."""
        return _starter_once(self.text, self.module, json.dumps(self.recipes), frozenset(self.blanks))

    @property
    def is_blank(self) -> bool:
        return self.number in self.blanks

    @property
    def contract(self) -> Path:
        """What a blank page has to promise."""
        return contract_of(self.number)

    def code(self, text: str | None = None) -> str:
        """The regions' text, moved to the left; of another version of the module if one is given."""
        return code_of(self.text if text is None else text, self.number, self.module)


def named_phase(number: str) -> str | None:
    """The phase of an exercise; None for one that has no such exercises. Phase 08 has hunts."""
    begin = f"{int(number.partition('.')[0]):02}_"
    return next((phase for phase in PHASES if phase.startswith(begin)), None)


def sort_key(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


def code_of(text: str, exercise: str, where: str) -> str:
    lines = text.split("\n")
    parts = [
        textwrap.dedent("\n".join(lines[region.start : region.stop])).strip("\n")
        for region in find_regions(text, where)
        if region.exercise == exercise
    ]
    return "\n\n".join(parts) + "\n"


def read_engine(root: Path = ROOT) -> dict[str, Exercise]:
    """Every exercise, by number, in order. LabError for regions that break a rule."""
    exercises: dict[str, Exercise] = {}
    recipes, blanks = read_recipes(root), read_blanks(root)
    phase_of: dict[str, str] = {}
    for path in (path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if "# region lab" not in text:
            continue
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for region in find_regions(text, str(path.relative_to(root))):
            number, phase = region.exercise, region.exercise.partition(".")[0]
            if named_phase(number) is None:
                raise LabError(f"{module}: lab {number}: there is no phase {phase}")
            if phase_of.setdefault(module, phase) != phase:
                raise LabError(
                    f"{module} has regions of phases {phase_of[module]} and {phase}; split the module"
                )
            exercise = exercises.setdefault(number, Exercise(number, module, text, [], recipes, blanks))
            if exercise.module != module:
                raise LabError(f"the regions of lab {number} lie in {exercise.module} and in {module}")
            exercise.regions.append(region)
    return {number: exercises[number] for number in sorted(exercises, key=sort_key)}


def read_recipes(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """What an exercise's functions are made of: exercise -> name of a function -> sentences for its starter.

    They are the `uses` of labs/NN_name/hints.toml.
    """
    return {number: entry["uses"] for number, entry in _hint_entries(root) if "uses" in entry}


def read_blanks(root: Path = ROOT) -> frozenset[str]:
    """Exercises that begin with a blank page: their `form` in labs/NN_name/hints.toml is "blank"."""
    return frozenset(number for number, entry in _hint_entries(root) if entry.get("form") == "blank")


def _hint_entries(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((root / "labs").glob("[01]*/hints.toml")):
        try:
            yield from hint_tables(path.read_text(encoding="utf-8")).items()
        except tomllib.TOMLDecodeError as error:
            raise LabError(f"{path.relative_to(root)}: {error}") from None


@cache
def hint_tables(text: str) -> dict[str, dict[str, Any]]:
    """Exercise -> what a hints.toml says of it: each of a phase's exercises asks, for one thing or another."""
    return tomllib.loads(text)


def contract_of(number: str) -> Path:
    return ROOT / "labs" / str(named_phase(number)) / "contracts" / f"{number}.md"


def starter(
    text: str,
    where: str,
    recipes: Mapping[str, Mapping[str, str]] | None = None,
    blanks: Collection[str] = (),
) -> str:
    """A module's text with a stub in the place of every body in a region, and recipes at the end of docstrings.

    recipes   as `read_recipes` gives them
    blanks    exercises of whose regions nothing is kept but the name that the engine calls

    LabError for what is no Python, and for a recipe whose function has no docstring or is not there.
    """
    try:
        tree, lines = ast.parse(text), text.split("\n")
    except SyntaxError as error:
        raise LabError(f"{where}:{error.lineno}: {error.msg}") from None
    regions, recipes = find_regions(text, where), recipes or {}
    missing = {(region.exercise, name) for region in regions for name in recipes.get(region.exercise, ())}
    for region in reversed(regions):
        missing -= {(region.exercise, function.name) for function in functions_in(tree, region)}
        uses = recipes.get(region.exercise, {})
        if region.exercise in blanks:
            lines[region.start : region.stop] = _blank_page(tree, lines, region, where)
            continue
        for first, last, new in reversed(list(_stubs(tree, lines, region, where, uses))):
            lines[first:last] = new
    for exercise, function in sorted(missing):
        raise LabError(f"lab {exercise} says what {function} may use, and {where} has no such function in it")
    if any("raise Todo(" in line for line in lines):
        lines.insert(_first_import(tree), "from labs.kit.overlay import Todo")
    result = "\n".join(lines)
    ast.parse(result, where)
    return result


@cache
def _starter_once(text: str, where: str, recipes: str, blanks: frozenset[str]) -> str:
    """As `starter`; most modules have several exercises, each of which asks.   recipes: as JSON"""
    return starter(text, where, json.loads(recipes), blanks)


def left_out(
    tree: ast.Module, lines: list[str], region: Region, where: str, stub: str
) -> Iterator[tuple[int, int, list[str]]]:
    """As `_stubs`, with the same line in the place of every body in the region."""
    for first, last, new in _stubs(tree, lines, region, where, {}):
        indent = new[0][: -len(new[0].lstrip())]
        yield first, last, [indent + stub]


def _stubs(
    tree: ast.Module, lines: list[str], region: Region, where: str, uses: Mapping[str, str]
) -> Iterator[tuple[int, int, list[str]]]:
    """(first line, line past the last, new lines) of all that is replaced, counted from 0.

    uses   name of a function -> what its docstring says last
    """
    title = json.dumps(f"lab {region.exercise}: {region.title}", ensure_ascii=False)
    functions = list(functions_in(tree, region))
    for function in functions:
        docstring = ast.get_docstring(function)
        body = function.body if docstring is None else function.body[1:]
        if function.name in uses:
            if docstring is None:
                raise LabError(f"{where}: {function.name} has no docstring that could say what to use")
            end = function.body[0].end_lineno
            yield end - 1, end, _with_recipe(lines[end - 1], uses[function.name], body[0].col_offset)
        if not body or body[0].lineno == function.lineno:
            raise LabError(
                f"{where}:{function.lineno}: {function.name} has no body that a stub could replace"
            )
        is_kernel = any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list)
        stub = f"tl.static_assert(False, {title})" if is_kernel else f"raise Todo({title})"
        if isinstance(function, ast.AsyncFunctionDef) and _is_generator(function):
            # Without it nothing of the stub would run: whoever iterates would be given a coroutine.
            stub += f"\n{' ' * body[0].col_offset}yield"
        yield body[0].lineno - 1, function.end_lineno, [" " * body[0].col_offset + stub]
    if functions:
        return
    code = [n for n in range(region.start, region.stop) if lines[n].strip() and lines[n].strip()[0] != "#"]
    inside = any(
        isinstance(node, Function) and node.lineno <= region.start and region.stop <= node.end_lineno
        for node in ast.walk(tree)
    )
    if not code or not inside:
        raise LabError(
            f"{where}:{region.start}: the region of lab {region.exercise} holds no function's code"
        )
    indent = lines[code[0]][: -len(lines[code[0]].lstrip())]
    yield code[0], region.stop, [f"{indent}raise Todo({title})"]


def _blank_page(tree: ast.Module, lines: list[str], region: Region, where: str) -> list[str]:
    """What stands in a region that the learner designs: the name that the engine calls, and where the contract is."""
    found = list(definitions_in(tree, region))
    if len(found) != 1:
        raise LabError(
            f"{where}: a blank page has one class or function, lab {region.exercise} has {len(found)}"
        )
    node, indent = found[0], " " * found[0].col_offset
    title = json.dumps(f"lab {region.exercise}: {region.title}", ensure_ascii=False)
    contract = contract_of(region.exercise).relative_to(ROOT).as_posix()
    page = [f"{indent}# A blank page. What it promises: `lab api {region.exercise}`, or {contract}"]
    if isinstance(node, ast.ClassDef):
        page += [
            lines[node.lineno - 1],
            f"{indent}    def __init__(self, *args: object, **kwargs: object) -> None:",
            f"{indent}        raise Todo({title})",
        ]
    else:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        page += [*lines[first - 1 : node.body[0].lineno - 1], f"{indent}    raise Todo({title})"]
    after = lines[max(node.end_lineno, region.start) : region.stop]
    blank_after = [] if any(line.strip() for line in after) else after
    return [*lines[region.start : region.start + _num_empty(lines, region)], *page, *blank_after]


def _num_empty(lines: list[str], region: Region) -> int:
    return next((n for n, line in enumerate(lines[region.start : region.stop]) if line.strip()), 0)


def definitions_in(node: ast.AST, region: Region) -> Iterator[Function | ast.ClassDef]:
    """Classes, functions and methods inside the region that are not part of another one there."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            if region.start < child.lineno and child.end_lineno <= region.stop:
                yield child
            elif isinstance(child, ast.ClassDef):
                yield from definitions_in(child, region)


def _with_recipe(last: str, recipe: str, column: int) -> list[str]:
    """What takes the place of a docstring's last line: the same with one paragraph more."""
    said, indent = last.rstrip().removesuffix('"""').rstrip(), " " * column
    paragraph = textwrap.wrap(
        f"To use: {recipe}", 120, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return [*([said] if said else []), "", *paragraph, f'{indent}"""']


def _is_generator(function: Function) -> bool:
    return any(isinstance(node, ast.Yield) for node in ast.walk(function))


def functions_in(node: ast.AST, region: Region) -> Iterator[Function]:
    """Functions and methods inside the region that are not part of another function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            if region.start < child.lineno and child.end_lineno <= region.stop:
                yield child
        elif isinstance(child, ast.ClassDef):
            yield from functions_in(child, region)


def _first_import(tree: ast.Module) -> int:
    """The line, from 0, where an import may stand: after the docstring and what comes from `__future__`."""
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and getattr(node, "module", None) != "__future__":
            return node.lineno - 1
    return 0


def unsolved(text: str) -> list[str]:
    """Exercises whose stubs still stand in the text, in order."""
    return list(dict.fromkeys(_STUB.findall(text)))


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


def edit(exercise: Exercise, edits: Iterable[tuple[str, str]]) -> str:
    """The module's text with each (old, new) carried out in the exercise's regions.

    LabError unless every `old` is there exactly once and the code that results is valid and another one.
    """
    text = exercise.text
    for old, new in edits:
        lines, found = text.split("\n"), 0
        for region in reversed(find_regions(text, exercise.module)):
            part = "".join(line + "\n" for line in lines[region.start : region.stop])
            if region.exercise == exercise.number and old:
                found += part.count(old)
                lines[region.start : region.stop] = part.replace(old, new).removesuffix("\n").split("\n")
        if found != 1:
            raise LabError(f"its old text is in the regions of lab {exercise.number} {found} times, not once")
        text = "\n".join(lines)
    try:
        made = _statements(text)
    except SyntaxError as error:
        raise LabError(f"it leaves code that does not parse: {error}") from error
    if _is_alike(made, _statements_once(exercise.text)):
        raise LabError("it changes nothing but comments and layout")
    return text


class _Statement(NamedTuple):
    """Of a module: its lines, with those before it that belong to no other, and its tree."""

    lines: list[str]
    tree: ast.stmt


def _statements(text: str) -> list[_Statement]:
    lines, tree = text.split("\n"), ast.parse(text)
    starts = [0, *(node.end_lineno for node in tree.body)]
    return [_Statement(lines[start : node.end_lineno], node) for start, node in zip(starts, tree.body)]


_statements_once = cache(_statements)  # many a mistake is made in one module


def _is_alike(some: list[_Statement], others: list[_Statement]) -> bool:
    """Whether they are the same but for comments and layout. To print trees takes long, so only where lines differ."""
    return len(some) == len(others) and all(
        # No line is left for what follows a semicolon.
        (mine.lines and mine.lines == their.lines) or ast.dump(mine.tree) == ast.dump(their.tree)
        for mine, their in zip(some, others)
    )
