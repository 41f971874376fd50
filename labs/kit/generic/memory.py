"""A second call, with other arguments, gives what it would give as the first of a process.

A few calls that tests make are kept, pickled, and made again in two ways: each alone, in a process in which no function
of the exercise was ever called, and all of them one after the other in another such process. There the arguments of a
call lie where those of the one before lay: a list is the same list with other contents, a tensor has its memory where
another one had it, and `id()` says so too. Each call is also made with its numbers changed. So what is remembered by an
id, by an address, in a default argument or in a module gives an answer of before, and is seen.

Ours is the measure. A method is called on one object for all of its calls where our own leaves that as it is. Of a
class that the learner has designed the methods are their own measure.
"""

import inspect
import os
import pickle
import random
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from labs.kit.generic.faults import Waits, finished
from labs.kit.generic.forked import fork, in_fork
from labs.kit.generic.snapshots import RESULT, Snapshot, TooLarge, changes, objects, snapshot
from labs.kit.generic.watching import Call, Watch

KEPT = 2  # calls of a function
TRIED = 16  # calls that are looked at for others than those kept
COSTLY = 4  # of them that cannot be pickled, or are too large; then no more are tried
LARGEST = 1 << 16  # bytes of a call's arguments


class Kept(NamedTuple):
    """A call.   arguments: args and kwargs, pickled"""

    function: str
    arguments: bytes


class Memory:
    """found: calls, with a sentence on what is wrong; whoever asks has them made"""

    title = "test_a_second_call_gives_what_a_first_one_would"

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.kept: dict[Kept, Call] = {}
        self.results: dict[str, list[Snapshot]] = {}
        self.tried: Counter[str] = Counter()
        self.costly: Counter[str] = Counter()
        self.fresh: FreshProcess | None = None

    def before(self, call: Call) -> Kept | None:
        """None for a call that is not to be kept."""
        self.fresh = self.fresh or FreshProcess(partial(_examine, self.watch))
        name = call.watched.qualname
        is_full = len(self.results.get(name, ())) >= KEPT
        if is_full or self.tried[name] >= TRIED or self.costly[name] >= COSTLY:
            return None
        self.tried[name] += 1
        try:
            kept = Kept(name, pickle.dumps((call.args, call.kwargs)))
        except Exception:  # whatever objects of tests raise
            kept = None
        if kept is None or len(kept.arguments) > LARGEST:
            self.costly[name] += 1
            return None
        return kept

    def after(self, call: Call, kept: Kept | None) -> None:
        """Calls that give the same tell nothing of each other."""
        results = self.results.setdefault(call.watched.qualname, [])
        if kept is None or kept in self.kept or len(results) >= KEPT:
            return
        with suppress(TooLarge):
            result = snapshot({RESULT: call.result}, deep=False, in_words=False)
            if call.result is None or result not in results:
                results.append(result)
                self.kept[kept] = call

    @property
    def found(self) -> list[tuple[Call, str]]:
        calls = list(self.kept)
        return [(self.kept[calls[n]], sentence) for n, sentence in self.fresh.ask(calls)] if calls else []


class FreshProcess:
    """A fork from before the first call of any of the exercise's functions. It answers one question."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        asked, self.question = os.pipe()
        self.answer, answered = os.pipe()
        self.child = fork()
        if not self.child:
            try:
                os.close(self.question)  # or this process would wait for itself
                os.close(self.answer)
                with os.fdopen(asked, "rb") as pipe:
                    question = pickle.loads(pipe.read())
                with os.fdopen(answered, "wb") as pipe:
                    pipe.write(pickle.dumps(answer(question)))
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answered)

    def ask(self, question: Any) -> Any:
        with os.fdopen(self.question, "wb") as pipe:
            pipe.write(pickle.dumps(question))
        with os.fdopen(self.answer, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(self.child, 0)
        return pickle.loads(answer)


def _examine(watch: Watch, calls: list[Kept]) -> list[tuple[int, str]]:
    """Numbers of calls, one of a function at most, and what is wrong with them."""
    found = []
    for function in dict.fromkeys(call.function for call in calls):
        numbers = [n for n, call in enumerate(calls) if call.function == function]
        if wrong := Replay(watch, [calls[n] for n in numbers]).first_wrong():
            step, sentence = wrong
            found.append((numbers[step.number], sentence))
    return found


class Step(NamedTuple):
    """A call to make.   number: of a kept one; is_changed: with other numbers"""

    number: int
    is_changed: bool


class Replay:
    """All kept calls of one function.   one_self: they are made on the first one's object"""

    def __init__(self, watch: Watch, calls: list[Kept]) -> None:
        self.watch, self.calls = watch, calls
        self.watched = watch.watched[calls[0].function]
        self.steps = [
            Step(number, is_changed) for number in range(len(calls)) for is_changed in (False, True)
        ]
        bodies = watch.bodies
        self.has_ours = bodies.ours(self.watched) is not None or not bodies.has(self.watched)
        self.one_self = False
        self.one_self = self.watched.is_method and bool(in_fork(self._leaves_self_alone))

    def first_wrong(self) -> tuple[Step, str] | None:
        """A call, and what is wrong with it."""
        at = self._first_differing(ours=False)
        if at is None or (self.has_ours and self._first_differing(ours=True) is not None):
            return None
        step = self._row()[at]
        alone = in_fork(partial(self._alone, step, ours=False, in_words=True))
        change = changes(alone, in_fork(partial(self._in_a_row, ours=False, in_words=True))[at])[0]
        return step, (
            f"{self.watched.name}: {change.path} is {change.now} after other calls, and {change.before} as the first "
            "of a process; something of an earlier call is remembered, perhaps by an id that another object has now"
        )

    def _first_differing(self, ours: bool) -> int | None:
        """Where in the row a call gives something else than alone."""
        states = in_fork(partial(self._in_a_row, ours, in_words=False)) or []
        first, *others = reversed(self.steps)
        alone = {step: in_fork(partial(self._alone, step, ours, in_words=False)) for step in others if states}
        alone |= dict(zip([first], states))  # nothing came before it
        for at, (step, state) in enumerate(zip(self._row(), states)):
            if state is not None and alone[step] is not None and changes(alone[step], state):
                return at
        return None

    def _row(self) -> list[Step]:
        return [*reversed(self.steps), *self.steps]

    def _alone(self, step: Step, ours: bool, in_words: bool) -> Snapshot | None:
        args, kwargs = self._arguments(step, ())
        return self._make((self._one_self(), *args[1:]) if self.one_self else args, kwargs, ours, in_words)

    def _in_a_row(self, ours: bool, in_words: bool) -> list[Snapshot | None]:
        states, held = [], ()
        first = self._one_self() if self.one_self else None
        for step in self._row():
            args, kwargs = self._arguments(step, held)
            if self.one_self:
                args = (first, *args[1:])
            states.append(self._make(args, kwargs, ours, in_words))
            held = (*args, *kwargs.values())
        return states

    def _one_self(self) -> Any:
        return pickle.loads(self.calls[0].arguments)[0][0]

    def _arguments(self, step: Step, held: tuple) -> tuple[tuple, dict[str, Any]]:
        """Of a call, as far as possible in the objects that are held."""
        args, kwargs = pickle.loads(self.calls[step.number].arguments)
        values = [
            _moved(value, into)
            for value, into in zip_longest((*args, *kwargs.values()), held[: len(args) + len(kwargs)])
        ]
        if step.is_changed:
            values = [_changed(value) for value in values]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :]))

    def _make(self, args: tuple, kwargs: dict[str, Any], ours: bool, in_words: bool) -> Snapshot | None:
        """What it returns or raises, and its arguments afterwards. None for what cannot be told."""
        random.seed(0)
        torch.default_generator.manual_seed(0)
        arguments = dict(self.watched.signature.bind(*args, **kwargs).arguments)
        bodies, names = self.watch.bodies, self.watched.function.__globals__
        self.watch.instead = lambda watched: (ours and bodies.ours(watched)) or watched.function
        try:
            names["id"] = _ids_of(arguments)
            result = self.watch.instead(self.watched)(*args, **kwargs)
            result = finished(result) if inspect.iscoroutine(result) else result
        except (TooLarge, Waits):
            return None
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        finally:
            self.watch.instead = None
            names.pop("id", None)
        if self.one_self:
            arguments.pop("self")
        try:
            return snapshot({RESULT: result} | arguments, deep=True, in_words=in_words)
        except TooLarge:
            return None

    def _leaves_self_alone(self) -> bool:
        """Whether our own method does, in all of the calls."""
        one_self = self._one_self()
        before = snapshot({"self": one_self}, deep=True, in_words=False)
        for step in self.steps:
            args, kwargs = self._arguments(step, ())
            self._make((one_self, *args[1:]), kwargs, ours=True, in_words=False)
        return not changes(before, snapshot({"self": one_self}, deep=True, in_words=False))


def _ids_of(arguments: dict[str, Any]) -> Callable[[object], int]:
    """An `id` that says of an argument, and of what is in it, where it is among the arguments."""
    places = {id(value): zlib.crc32(path.encode()) for path, value, _ in objects(arguments, deep=False)}
    return lambda value: places.get(id(value)) or id(value)


def _moved(value: Any, into: Any) -> Any:
    """The value, in an object that was another one until now, where both are of one kind."""
    if type(value) is not type(into):
        return value
    if isinstance(into, torch.Tensor):
        is_alike = (into.shape, into.stride(), into.dtype) == (value.shape, value.stride(), value.dtype)
        with suppress(RuntimeError):  # of what may not be written to
            return into.copy_(value) if is_alike else value
    elif isinstance(into, np.ndarray) and (into.shape, into.dtype) == (value.shape, value.dtype):
        into[...] = value
        return into
    elif isinstance(into, list):
        into[:] = value
        return into
    elif isinstance(into, dict | set):
        into.clear()
        into.update(value)
        return into
    return value


def _changed(value: Any) -> Any:
    """Other numbers in the same place: half of each, or what is in a sequence the other way round."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        with suppress(RuntimeError):
            return value.mul_(0.5)
    elif type(value) is list:
        value.reverse()
    elif type(value) is tuple:
        return value[::-1]
    return value
