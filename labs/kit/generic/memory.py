"""A second call, with other arguments, gives what it would give as the first of a process.

Calls that tests make are kept, pickled, and made again in two ways: each alone, in a process in which no function of the
exercise was ever called, and all of them one after the other in another such process. There the arguments of a call lie
where those of the one before lay: a list is the same list with other contents, a tuple has the same id. So what is
remembered by `id()`, in a default argument or in a module gives an answer of before, and is seen.

Ours is the measure. A method is called on one object for all of its calls where our own leaves that as it is.
"""

import inspect
import os
import pickle
import random
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from labs.kit.generic.faults import Waits, finished
from labs.kit.generic.forked import fork, in_fork
from labs.kit.generic.snapshots import SIMPLE, Snapshot, TooLarge, changes, snapshot
from labs.kit.generic.watching import Call, Watch

KEPT = 3  # calls of a function
REFUSED = 4  # of its calls that cannot be pickled; then no more are tried
LARGEST = 1 << 16  # bytes of a call's arguments
TRIED = 16  # times that arguments are made anew to get an address of before,
SMALL = 1 << 12  # where they have no more bytes than this
RESULT = "the result"


class Kept(NamedTuple):
    """A call.   arguments: args and kwargs, pickled"""

    function: str
    arguments: bytes


class Memory:
    title = "test_a_second_call_gives_what_a_first_one_would"

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.kept: dict[Kept, Call] = {}
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.fresh: FreshProcess | None = None

    def before(self, call: Call) -> None:
        self.fresh = self.fresh or FreshProcess(self.watch)
        name = call.watched.qualname
        if self.counts[name] >= KEPT or self.refused[name] >= REFUSED:
            return
        try:
            kept = Kept(name, pickle.dumps((call.args, call.kwargs)))
        except Exception:  # whatever objects of tests raise
            kept = None
        if kept is None or len(kept.arguments) > LARGEST:
            self.refused[name] += 1
        elif kept not in self.kept:
            self.kept[kept] = call
            self.counts[name] += 1

    def after(self, call: Call, kept: None) -> None:
        pass

    @property
    def found(self) -> list[tuple[Call, str]]:
        if not self.kept:
            return []
        calls = list(self.kept)
        return [(self.kept[calls[n]], sentence) for n, sentence in self.fresh.examine(calls)]


class FreshProcess:
    """A fork from before the first call of any of the exercise's functions. It waits for calls to make."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        asked, self.ask = os.pipe()
        self.answer, answered = os.pipe()
        self.child = fork()
        if not self.child:
            self._serve(asked, answered)
        os.close(asked)
        os.close(answered)

    def _serve(self, asked: int, answered: int) -> None:
        try:
            os.close(self.ask)  # or this process would wait for itself
            os.close(self.answer)
            with os.fdopen(asked, "rb") as pipe:
                question = pipe.read()
            with os.fdopen(answered, "wb") as pipe:
                pipe.write(pickle.dumps(_examine(self.watch, pickle.loads(question))))
        finally:
            os._exit(0)

    def examine(self, calls: list[Kept]) -> list[tuple[int, str]]:
        """Numbers of calls, and what is wrong with them."""
        with os.fdopen(self.ask, "wb") as pipe:
            pipe.write(pickle.dumps(calls))
        with os.fdopen(self.answer, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(self.child, 0)
        return pickle.loads(answer) if answer else []


def _examine(watch: Watch, calls: list[Kept]) -> list[tuple[int, str]]:
    found = []
    for function in dict.fromkeys(call.function for call in calls):
        numbers = [n for n, call in enumerate(calls) if call.function == function]
        replay = Replay(watch, [calls[n] for n in numbers])
        if (wrong := replay.first_wrong()) is not None:
            number, sentence = wrong
            found.append((numbers[number], sentence))
    return found


class Replay:
    """All kept calls of one function."""

    def __init__(self, watch: Watch, calls: list[Kept]) -> None:
        self.watch, self.calls = watch, calls
        self.watched = watch.watched[calls[0].function]
        self.one_self = self.watched.is_method and bool(in_fork(self._leaves_self_alone))

    def first_wrong(self) -> tuple[int, str] | None:
        """The number of a call and what is wrong with it."""
        wrong = self._differing(ours=False)
        if wrong is None or self._differing(ours=True) is not None:
            return None
        at, number = wrong
        alone = in_fork(partial(self._alone, number, ours=False, in_words=True))
        change = changes(alone, in_fork(partial(self._in_a_row, ours=False, in_words=True))[at])[0]
        name = self.watched.name
        return number, (
            f"{name}: {change.path} is {change.now} after other calls, and {change.before} as the first of a process; "
            "something of an earlier call is remembered, perhaps by an id() that another object has by now"
        )

    def _differing(self, ours: bool) -> tuple[int, int] | None:
        """Where in the row a call gives something else than alone, and the call's number."""
        row = in_fork(partial(self._in_a_row, ours, in_words=False))
        alone = [in_fork(partial(self._alone, n, ours, in_words=False)) for n in range(len(self.calls))]
        for at, (number, state) in enumerate(zip(self._order(), row or ())):
            if state is not None and alone[number] is not None and changes(alone[number], state):
                return at, number
        return None

    def _order(self) -> list[int]:
        numbers = list(range(len(self.calls)))
        return [*reversed(numbers), *numbers]

    def _alone(self, number: int, ours: bool, in_words: bool) -> Snapshot | None:
        return self._make(*self._with_self(self._arguments(number)), ours, in_words)

    def _in_a_row(self, ours: bool, in_words: bool) -> list[Snapshot | None]:
        states = []
        held: list[Any] = []
        first = self._arguments(0)[0][0] if self.one_self else None
        for number in self._order():
            args, kwargs = self._at_the_same_place(held, number)
            if self.one_self:
                args = (first, *args[1:])
            states.append(self._make(args, kwargs, ours, in_words))
            held[:] = [*args, *kwargs.values()]
            del args, kwargs  # or what is in them could not give its place to others
        return states

    def _arguments(self, number: int) -> tuple[tuple, dict[str, Any]]:
        return pickle.loads(self.calls[number].arguments)

    def _with_self(self, arguments: tuple[tuple, dict[str, Any]]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = arguments
        return ((self._arguments(0)[0][0], *args[1:]) if self.one_self else args), kwargs

    def _at_the_same_place(self, held: list[Any], number: int) -> tuple[tuple, dict[str, Any]]:
        """A call's arguments, as far as possible in the places of those that are held, which are given up."""
        places = [id(value) for value in held]
        changeable = [value if type(value) in _INTO else None for value in held]
        held.clear()
        others = []  # so that each attempt gets other places
        is_tried = places and len(self.calls[number].arguments) <= SMALL and None in changeable
        for _ in range(TRIED if is_tried else 1):
            args, kwargs = self._arguments(number)
            values = [*args, *kwargs.values()]
            if any(id(v) == place and type(v) not in SIMPLE for v, place in zip(values, places)):
                break
            others.append(values)
        values = [_moved(value, into) for value, into in zip_longest(values, changeable[: len(values)])]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :]))

    def _make(self, args: tuple, kwargs: dict[str, Any], ours: bool, in_words: bool) -> Snapshot | None:
        """What it returns or raises, and its arguments afterwards. None for what cannot be told."""
        random.seed(0), torch.default_generator.manual_seed(0)
        bodies = self.watch.bodies
        self.watch.instead = lambda watched: (ours and bodies.ours(watched)) or watched.function
        try:
            result = self.watch.instead(self.watched)(*args, **kwargs)
            said = {RESULT: finished(result) if inspect.iscoroutine(result) else result}
        except Waits:
            return None
        except BaseException as error:
            said = {"the error": f"{type(error).__name__}: {error}"}
        finally:
            self.watch.instead = None
        said |= self.watched.signature.bind(*args, **kwargs).arguments
        if self.one_self:
            said.pop("self")
        try:
            return snapshot(said, deep=True, in_words=in_words)
        except TooLarge:
            return None

    def _leaves_self_alone(self) -> bool:
        """Whether our own method does, in all of the calls."""
        args, _ = self._arguments(0)
        before = snapshot({"self": args[0]}, deep=True, in_words=False)
        self.one_self = False
        for number in range(len(self.calls)):
            others, kwargs = self._arguments(number)
            self._make((args[0], *others[1:]), kwargs, ours=True, in_words=False)
        return not changes(before, snapshot({"self": args[0]}, deep=True, in_words=False))


_INTO = (list, dict, set, torch.Tensor, np.ndarray)


def _moved(value: Any, into: Any) -> Any:
    """The value, in an object that was another one until now where they are of one kind."""
    if type(value) is not type(into) or into is None:
        return value
    if isinstance(into, torch.Tensor):
        with suppress(RuntimeError):
            is_alike = into.shape == value.shape and into.stride() == value.stride()
            return into.copy_(value) if is_alike and into.dtype == value.dtype else into.set_(value)
        return value
    if isinstance(into, np.ndarray):
        if (into.shape, into.dtype) != (value.shape, value.dtype):
            return value
        into[...] = value
    elif isinstance(into, list):
        into[:] = value
    else:
        into.clear()
        into.update(value)
    return into
