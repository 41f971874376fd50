"""Many changes of the engine's functions, each tried by its exercise's tests, without an import for each.

Most of what a change costs is the import of the engine and of what the tests want. Here one process imports both, and
its forks put the change into the functions that are there. What no test sees that way runs once more in the ordinary
way, where modules are imported with the change and each exercise's general checks watch them: so no change is taken
for unseen that `forks.run` would have seen, and most, which the first test sees, are cheap.
"""

import gc
import importlib
import inspect
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import CodeType, FunctionType, ModuleType

from labs.kit.forks import WANTED_BY_ALL, Job, Outcome, import_for_forks, run
from labs.kit.overlay import Overlay, Source, engine_file
from labs.kit.regions import read_engine

Put = Callable[[], None]


def run_changes(
    jobs: Iterable[Job], limit: float | None = None, at_a_time: int | None = None
) -> Iterator[tuple[Job, Outcome]]:
    """As `forks.run`, with the same verdict on each job; of one that fails only that it does."""
    jobs = list(jobs)
    left = dict(enumerate(jobs))
    for index, outcome in _run_in_place(jobs, limit, at_a_time):
        yield left.pop(index), outcome
    yield from run(left.values(), limit=limit, at_a_time=at_a_time)


def _run_in_place(
    jobs: list[Job], limit: float | None, at_a_time: int | None
) -> Iterator[tuple[int, Outcome]]:
    """The numbers of the jobs that fail, with their outcomes. This process imports nothing of the engine."""
    context = multiprocessing.get_context("fork")
    import_for_forks(WANTED_BY_ALL)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(jobs, limit, at_a_time, sender))
    process.start()
    sender.close()
    try:
        while True:
            yield receiver.recv()
    except EOFError:
        process.join()
    finally:
        process.terminate()


def _serve(jobs: list[Job], limit: float | None, at_a_time: int | None, sender: Connection) -> None:
    """In a process of its own, which has the engine."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Overlay)]
    for exercise in read_engine().values():
        if exercise.module.startswith("minivllm."):  # phase 00's file is in no package
            importlib.import_module(exercise.module)
    changed = {module for job in jobs for module in job.sources}
    known = {name: functions_of(sys.modules[name]) for name in changed & sys.modules.keys()}
    gc.freeze()
    in_place = []
    for index, job in enumerate(jobs):
        puts = [put_of(name, source, known.get(name, {})) for name, source in job.sources.items()]
        if puts and None not in puts:
            in_place.append(replace(job, key=index, in_place=tuple(puts)))
    for job, outcome in run(in_place, limit=limit, at_a_time=at_a_time):
        if outcome.of("failed"):
            sender.send((job.key, outcome))


def functions_of(module: ModuleType) -> dict[str, list[FunctionType]]:
    """Qualified name -> the functions of a module's file that have it, in the order of their lines."""
    found: dict[str, list[FunctionType]] = {}
    for value in gc.get_objects():
        is_its = isinstance(value, FunctionType) and value.__globals__ is module.__dict__
        if is_its and value.__code__.co_filename == module.__file__:
            found.setdefault(value.__code__.co_qualname, []).append(value)
    return {
        name: sorted(some, key=lambda function: function.__code__.co_firstlineno)
        for name, some in found.items()
    }


def put_of(module: str, source: Source, functions: dict[str, list[FunctionType]]) -> Put | None:
    """What makes a module's functions those of another text. None where more than functions' bodies differs."""
    ours, theirs = (
        compile(text, source.path, "exec", dont_inherit=True)
        for text in (engine_file(module).read_text(encoding="utf-8"), source.text)
    )
    before, after = dict(_bodies(ours)), dict(_bodies(theirs))
    if _around(ours) != _around(theirs) or before.keys() != after.keys():
        return None
    pairs = []
    for (name, nth), code in after.items():
        if _whole(code) == _whole(before[name, nth]):
            continue
        same = functions.get(name, [])
        if len(same) != sum(other == name for other, _ in after):
            return None
        if same[nth].__code__.co_freevars != code.co_freevars:
            return None
        pairs.append((same[nth], code))

    def put() -> None:
        for function, code in pairs:
            function.__code__ = code

    return put if pairs else None


def _bodies(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The functions of a module and of its classes, not those inside them, each with which of its name it is."""
    seen: dict[str, int] = {}
    for inner in _outer(code):
        nth = seen[inner.co_qualname] = seen.get(inner.co_qualname, -1) + 1
        yield (inner.co_qualname, nth), inner


def _outer(code: CodeType) -> Iterator[CodeType]:
    for inner in filter(_is_code, code.co_consts):
        if _is_function(inner):
            yield inner
        else:
            yield from _outer(inner)


def _is_code(value: object) -> bool:
    return isinstance(value, CodeType)


def _is_function(code: CodeType) -> bool:
    """Or a lambda or a comprehension. Bodies of modules and classes have no fast locals."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _around(code: CodeType) -> tuple:
    """What runs when the module is imported, but for where its lines are."""
    inner = [_around(each) for each in filter(_is_code, code.co_consts) if not _is_function(each)]
    return (*_own(code), tuple(inner))


def _whole(code: CodeType) -> tuple:
    """A function, and those inside it."""
    return (*_own(code), tuple(_whole(each) for each in filter(_is_code, code.co_consts)))


def _own(code: CodeType) -> tuple:
    consts = tuple(repr(value) for value in code.co_consts if not _is_code(value))
    return code.co_qualname, code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts
