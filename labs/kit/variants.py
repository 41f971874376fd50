"""Other right answers. Each is written from the last hint alone, and holds that hint to the code it is about.

`labs/NN_name/variants/N.M.toml` has as `code` the functions of an exercise, with signatures and bodies, as a learner
might write them. A variant passes the exercise's tests, and all together are an engine that passes its whole suite.
Beside `code` may be `others`: answers of another design, which owe nothing to a hint. A blank page has two at least,
since its tests must not ask for our design.
"""

import ast
import builtins
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from labs.kit.forks import Job, run
from labs.kit.hints import hints_of
from labs.kit.migrate import defined, transplant
from labs.kit.mutants import Verdict, picked
from labs.kit.overlay import Source, engine_file
from labs.kit.regions import ROOT, Exercise, Function, LabError, code_of, read_engine, splice, starter

_CODE_WORD = re.compile(r"\b[A-Za-z]\w*_\w+|\b_\w+")  # what only code is called


def variant_of(exercise: Exercise) -> str:
    """The functions as they stand in the file. LabError when there is none, or it is not as it should be."""
    return _read(exercise)["code"]


def designs_of(exercise: Exercise) -> dict[str, str]:
    """Answers of another design than ours: what is other about each -> its code."""
    return _read(exercise).get("others", {})


def _read(exercise: Exercise) -> dict[str, Any]:
    path = ROOT / "labs" / exercise.phase / "variants" / f"{exercise.number}.toml"
    if not path.is_file():
        raise LabError(f"{path.relative_to(ROOT)} is missing")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        table["code"]
        return table
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise LabError(f"{path.relative_to(ROOT)}: {error}") from None


def with_variant(exercise: Exercise, text: str | None = None, code: str | None = None) -> str:
    """A version of the exercise's module with the variant in its place. LabError where it does not fit.

    code   one of `designs_of` in the variant's place
    """
    fresh = starter(exercise.text, exercise.module, blanks=exercise.blanks)
    try:
        filled = transplant(code or variant_of(exercise), fresh, exercise.number, exercise.is_blank)
    except LabError as error:
        raise LabError(f"the variant of lab {exercise.number}: {error}") from None
    others = read_engine().keys() - {exercise.number}
    made = splice(exercise.text if text is None else text, filled, others, exercise.module)[0]
    if _tree(exercise, made) == _tree(exercise, exercise.text):
        raise LabError(f"the variant of lab {exercise.number} is our own code")
    return made


def _tree(exercise: Exercise, text: str) -> str:
    return ast.dump(ast.parse(code_of(text, exercise.number, exercise.module)))


def check_variants(exercises: Iterable[Exercise]) -> Iterator[Verdict]:
    """A verdict on each variant: what it and the last hint do not say of each other, then what the tests say."""
    jobs = []
    for exercise in exercises:
        try:
            path = f"{engine_file(exercise.module)} [variant]"  # no such file: it is read from linecache
            for code in (None, *designs_of(exercise).values()):
                made = with_variant(exercise, code=code)
                jobs.append(Job(exercise, exercise.number, {exercise.module: Source(path, made)}))
            if said := drift(exercise):
                yield Verdict(exercise.number, None, False, said)
        except LabError as error:
            yield Verdict(exercise.number, None, False, str(error))
    for job, outcome in run(jobs):
        wrong = outcome.trouble or next(
            (f"{r.test}: {r.message}" for r in outcome.of("failed", "todo")), None
        )
        said = wrong or f"{len(outcome.of('passed'))} tests pass in {outcome.seconds:.1f} s"
        yield Verdict(job.exercise, None, outcome.passed, said)


def one_a_phase(exercises: Iterable[Exercise]) -> list[Exercise]:
    """The same in every run, chosen by nobody (`picked`)."""
    by_number = {exercise.number: exercise for exercise in exercises}
    phases: dict[str, list[str]] = {}
    for exercise in by_number.values():
        phases.setdefault(exercise.phase, []).append(exercise.number)
    return [by_number[picked(numbers)] for numbers in phases.values()]


def drift(exercise: Exercise) -> str | None:
    """What the last hint and the variant do not have in common, in a sentence.

    The hint must name everything of the engine's that the variant uses. What it calls by a name that only code has
    must be in the exercise's module or in the variant.
    """
    hint, code = hints_of(exercise).hints[-1], variant_of(exercise)
    known = set(re.findall(r"\w+", hint))
    if untold := sorted(_used(code) & _engine_names() - known):
        return f"the last hint does not name {', '.join(untold)}, which the variant uses"
    there = set(re.findall(r"\w+", exercise.text + code))
    if gone := sorted(set(_CODE_WORD.findall(hint)) - there):
        return f"the last hint names {', '.join(gone)}, which neither our code nor the variant has"
    return None


def _used(code: str) -> set[str]:
    """Names that the code reads and does not make: attributes, functions, constants."""
    tree = ast.parse(code)
    names, made = set(), set()
    for holder in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        made.add(holder.name)
        own = (n for n in ast.walk(holder) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        made |= {attribute.attr for attribute in own}
    for function in defined(tree):
        made.add(function.name)
        arguments = function.args
        made |= {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Name):
                (names if isinstance(node.ctx, ast.Load) else made).add(node.id)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
    return names - made


@cache
def _engine_names() -> set[str]:
    """What the engine defines anywhere, but for names that Python's or PyTorch's own things have as well."""
    import torch

    names = set()
    for path in (ROOT / "minivllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    others = (builtins, dict, list, set, str, int, bytes, torch, torch.Tensor)
    return names - {name for thing in others for name in dir(thing)}
