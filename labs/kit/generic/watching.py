"""Every call of an exercise's functions is seen by observers while its tests run.

The exercise's module is loaded with a decorator on each function of its regions. So nothing is listed by hand, and a
function that a learner adds is watched too. Generators are not watched, since their bodies run in pieces, and neither
are Triton's kernels, which Python does not run.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Protocol

import torch

from labs.kit.overlay import Source, Todo, compile_source, engine_file
from labs.kit.plugin import TITLE
from labs.kit.regions import ROOT, Exercise, Function, find_regions, functions_in

DECORATOR, MARK = "__watched__", "__called__"  # what watched modules have of ours
CALLS_A_TEST = 20  # of one function
MADE_BY = ("__init__", "__post_init__")  # they make what they are called on


@dataclass
class Call:
    """arguments: by parameter; number: from 1, of the test's calls of the function; asked: file:line of the test"""

    watched: "Watched"
    args: tuple
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    number: int
    asked: str
    result: Any = None
    error: BaseException | None = None


class Observer(Protocol):
    def before(self, call: Call) -> Any:
        """Returns what it wants to have again afterwards."""

    def after(self, call: Call, kept: Any) -> None:
        """The call has ended: `result` or `error` is there."""


class Watched:
    """A function of the exercise.   function: the learner's, a mutant's or ours, as its module has it"""

    def __init__(self, qualname: str, function: FunctionType) -> None:
        self.qualname = qualname
        self.function = function
        self.name = function.__name__
        self.signature = inspect.signature(function)
        self.is_method = next(iter(self.signature.parameters), "") == "self"

    @property
    def place(self) -> str:
        code = self.function.__code__
        return f"{os.path.relpath(code.co_filename, ROOT)}:{code.co_firstlineno}"


class Watch(importlib.abc.MetaPathFinder):
    """Loads one exercise's module with its functions watched.

    source     where the module comes from; None = the engine
    instead    what is called in the place of a watched function, in a process that plays calls again
    unsolved   what a stub has raised
    """

    def __init__(self, exercise: Exercise, source: Source | None) -> None:
        self.exercise = exercise
        self.source = source or Source(str(engine_file(exercise.module)), exercise.text)
        self.observers: list[Observer] = []
        self.watched: dict[str, Watched] = {}
        self.bodies = Bodies(exercise, self.source)
        self.instead: Callable[[Watched], Callable] | None = None
        self.unsolved: Todo | None = None
        self.process = os.getpid()
        self.counts: Counter[str] = Counter()
        self.test, self.test_file = "", ""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.exercise.module:
            return None
        return importlib.util.spec_from_file_location(name, self.source.path, loader=_Loader(self))

    @property
    def has_functions(self) -> bool:
        """Whether there is anything to watch."""
        tree = ast.parse(self.source.text)
        return any(True for _ in _exercise_functions(tree, self.source.text, self.exercise))

    def begin_test(self, test: str, file: str) -> None:
        self.test, self.test_file = test, file
        self.counts.clear()

    def end_test(self) -> None:
        self.test = ""

    def decorate(self, qualname: str) -> Callable[[FunctionType], Callable]:
        def decorate(function: FunctionType) -> Callable:
            is_in_pieces = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
            if is_in_pieces or not isinstance(function, FunctionType):
                return function
            watched = self.watched[qualname] = Watched(qualname, function)
            made = self._waiting if inspect.iscoroutinefunction(function) else self._plain
            return functools.wraps(function)(made(watched))

        return decorate

    def _plain(self, watched: Watched) -> Callable:
        def call_watched(*args: Any, **kwargs: Any) -> Any:
            if self.instead is not None:
                return self.instead(watched)(*args, **kwargs)
            if (call := self._begin(watched, args, kwargs)) is None:
                return watched.function(*args, **kwargs)
            with _Observed(self, call):
                call.result = watched.function(*args, **kwargs)
                return call.result

        return call_watched

    def _waiting(self, watched: Watched) -> Callable:
        async def call_watched(*args: Any, **kwargs: Any) -> Any:
            if self.instead is not None:
                return await self.instead(watched)(*args, **kwargs)
            if (call := self._begin(watched, args, kwargs)) is None:
                return await watched.function(*args, **kwargs)
            with _Observed(self, call):
                call.result = await watched.function(*args, **kwargs)
                return call.result

        return call_watched

    def _begin(self, watched: Watched, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        """None for a call that nobody looks at: outside tests, in a process that a test began, or one of too many."""
        self.counts[watched.qualname] += 1
        number = self.counts[watched.qualname]
        if not self.test or number > CALLS_A_TEST or os.getpid() != self.process:
            return None
        try:
            arguments = dict(watched.signature.bind(*args, **kwargs).arguments)
        except TypeError:  # the call itself says it better
            return None
        self.bodies.prepare()
        return Call(watched, args, kwargs, arguments, number, self._asked())

    def _asked(self) -> str:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self.test_file:
            frame = frame.f_back
        return f"{os.path.relpath(self.test_file, ROOT)}:{frame.f_lineno}" if frame else self.test


class _Observed:
    """What observers do around a call. No generator: what the call raises must not pass through one more frame."""

    def __init__(self, watch: Watch, call: Call) -> None:
        self.watch, self.call = watch, call

    def __enter__(self) -> None:
        with torch._C.DisableTorchFunction():  # tests count what is done with tensors
            self.kept = [observer.before(self.call) for observer in self.watch.observers]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Todo) and TITLE.fullmatch(str(error)):  # and not one that a test has thrown
            self.watch.unsolved = error
            return
        self.call.error = error
        with torch._C.DisableTorchFunction():
            for observer, kept in zip(self.watch.observers, self.kept):
                observer.after(self.call, kept)
        self.call.error = self.call.result = None  # tests ask whether they are freed


class _Loader(importlib.abc.Loader):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def exec_module(self, module: ModuleType) -> None:
        watch, source = self.watch, self.watch.source
        tree = compile_source(source)
        for qualname, function in _exercise_functions(tree, source.text, watch.exercise):
            mark = ast.Call(ast.Name(DECORATOR, ast.Load()), [ast.Constant(qualname)], [])
            function.decorator_list.append(_placed(mark, function))
        module.__dict__[DECORATOR] = watch.decorate
        module.__dict__[MARK] = watch.bodies.called
        exec(compile(tree, source.path, "exec", dont_inherit=True), module.__dict__)


def _exercise_functions(tree: ast.Module, text: str, exercise: Exercise) -> Iterator[tuple[str, Function]]:
    """Functions and methods of the exercise's regions, with their qualified names; no kernels.

    tree   of the text, perhaps with other line numbers
    """
    inside = ast.parse(text)
    regions = [region for region in find_regions(text, exercise.module) if region.exercise == exercise.number]
    wanted = {function for region in regions for function in functions_in(inside, region)}
    for (qualname, function), (_, found) in zip(_functions(inside, ""), _functions(tree, "")):
        is_kernel = any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list)
        if function in wanted and not is_kernel:
            yield qualname, found


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def _placed(node: ast.expr, at: ast.AST) -> ast.expr:
    for part in ast.walk(node):
        ast.copy_location(part, at)
        part.end_lineno, part.end_col_offset = at.lineno, at.col_offset
    return node


class Bodies:
    """The bodies of watched functions once more, theirs and ours, with every call in them marked.

    on_call   asked with (place in the body, what is called) before each call; returns what is called instead
    """

    def __init__(self, exercise: Exercise, source: Source) -> None:
        self.exercise, self.source = exercise, source
        self.on_call: Callable[[int, Callable], Callable] | None = None
        self._codes: dict[bool, dict[str, CodeType]] = {}

    def prepare(self) -> None:
        """Compile them. Forks of this process need not do it again."""
        if not self._codes:
            theirs = _marked(self.source, self.exercise)
            engine = Source(str(engine_file(self.exercise.module)), self.exercise.text)
            is_ours = self.source.text == engine.text
            self._codes = {False: theirs, True: theirs if is_ours else _marked(engine, self.exercise)}

    def called(self, place: int, function: Callable) -> Callable:
        return function if self.on_call is None else self.on_call(place, function)

    def theirs(self, watched: Watched) -> FunctionType:
        return _made(self._codes[False][watched.qualname], watched)

    def ours(self, watched: Watched) -> FunctionType | None:
        """None for a function that only the learner has, and for a method of a class that the learner has designed.

        What our method does to the attributes of another design says nothing.
        """
        if self.exercise.is_blank and "." in watched.qualname and self._makes(watched.qualname):
            return None
        code = self._codes[True].get(watched.qualname)
        return code and _made(code, watched)

    def has(self, watched: Watched) -> bool:
        """Whether the exercise asks for this function; else it is a helper of the learner's."""
        return watched.qualname in self._codes[True]

    def _makes(self, qualname: str) -> bool:
        """Whether the class of a method is made in the exercise as a whole."""
        return f"{qualname.rpartition('.')[0]}.__init__" in self._codes[True]


def _marked(source: Source, exercise: Exercise) -> dict[str, CodeType]:
    """Code of the exercise's functions by qualified name, in which each call asks `MARK` what to call."""
    tree = compile_source(source)
    marker, wanted = _Marker(), set()
    for qualname, function in _exercise_functions(tree, source.text, exercise):
        function.body = [marker.visit(statement) for statement in function.body]
        wanted.add(qualname)
    whole = compile(tree, source.path, "exec", dont_inherit=True)
    return {code.co_qualname: code for code in _codes(whole) if code.co_qualname in wanted}


class _Marker(ast.NodeTransformer):
    """`f(x)` becomes `MARK(place, f)(x)`. Python must see `super()` as it is."""

    def __init__(self) -> None:
        self.places = 0

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Name) and node.func.id == "super"):
            self.places += 1
            arguments = [ast.Constant(self.places), node.func]
            mark = ast.Call(ast.Name(MARK, ast.Load()), arguments, [])
            for part in (mark, mark.func, arguments[0]):
                ast.copy_location(part, node.func)
            node.func = mark
        return node


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _made(code: CodeType, watched: Watched) -> FunctionType:
    """The code as a function in the place of the watched one."""
    like = watched.function
    cells = dict(zip(like.__code__.co_freevars, like.__closure__ or ()))
    closure = tuple(
        cells[name] if name in cells else CellType(_class_of(watched)) for name in code.co_freevars
    )
    made = FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    made.__kwdefaults__ = like.__kwdefaults__
    return made


def _class_of(watched: Watched) -> Any:
    names = watched.qualname.split(".")
    return functools.reduce(getattr, names[1:-1], watched.function.__globals__[names[0]])
