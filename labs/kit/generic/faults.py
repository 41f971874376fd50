"""Each call that a body makes raises an ordinary error once: what comes out, and what is left behind?

A call of an exercise's function is played again in forks of the process, before it runs. Each time another call that
its body makes raises instead of doing anything. The error must come out. What others can see is then as it was, or as
if nothing had failed. What is private must only not stand in the way of a second attempt.

A fork is what costs time here. So one that finds everything as it was goes on with the next call, and whatever does not
look well after others is played once more in a fork of its own, before anything is said of it.

Ours is the measure: when a call fails in a learner's body no more is asked than our own does when that call fails.
"""

import inspect
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

from labs.kit.generic.forked import MOST_CPU, in_fork
from labs.kit.generic.snapshots import RESULT, Change, Snapshot, TooLarge, changes, snapshot, words_of
from labs.kit.generic.table import Table
from labs.kit.generic.watching import MADE_BY, Call, Watch, Watched
from labs.kit.plugin import chain

PLAYED = 6  # calls of a function at most
PLAYED_IN_VAIN = 2  # one after the other that reach nothing new: then no more
MOST_STEPS = 1000  # of a coroutine that waits for nothing
MOST_CHANGES = 3  # that are kept for people
SAFE = sys.stdlib_module_names | {"builtins"}  # what comes from there is not what fails


class Fault(RuntimeError):
    """What a call raises that fails here."""


class Waits(Exception):
    """The body waits for something that never comes here."""


class Made(NamedTuple):
    """A call that a body makes.   place: in the body; name: of what is called"""

    place: int
    name: str


Key = tuple[str, int, bool]  # a function, a place in its body, and whether that was reached more than once


class Clean(NamedTuple):
    """What happens when nothing fails.

    made      calls that may fail, in their order
    outcome   what is returned or raised; state: of all arguments afterwards
    """

    made: list[Made]
    outcome: Snapshot
    state: Snapshot


class Failure(NamedTuple):
    """What happens when one call fails.

    came_out     whether the error did; else `returned` says what there was instead
    is_kept      whether everything is as before, or as after a call in which nothing fails
    is_seen      whether it is not, in attributes that are not private
    can_repeat   whether it is, or a second attempt gives what a first one gives
    left, again  what is not as before, and what a second attempt gives otherwise; a few of each
    """

    came_out: bool
    is_kept: bool
    is_seen: bool
    can_repeat: bool
    returned: str
    left: list[Change]
    again: list[Change]

    @property
    def is_well(self) -> bool:
        """Whether nobody could do better."""
        return self.came_out and not self.is_seen and self.can_repeat


class Faults:
    """found: calls, with a sentence on what is wrong"""

    title = "test_an_error_on_the_way_comes_out_and_leaves_nothing_behind"

    def __init__(self, watch: Watch, table: Table) -> None:
        self.watch, self.table = watch, table
        self.played: Counter[str] = Counter()
        self.in_vain: Counter[str] = Counter()
        self.covered: set[Key] = set()
        self.found: list[tuple[Call, str]] = []

    def before(self, call: Call) -> None:
        name = call.watched.qualname
        is_done = self.played[name] >= PLAYED or self.in_vain[name] >= PLAYED_IN_VAIN
        # Calls of other threads may wait for threads that a fork has not.
        if not is_done and not self.found and threading.current_thread() is threading.main_thread():
            self.played[name] += 1
            self._play(call)

    def after(self, call: Call, kept: None) -> None:
        pass

    def _play(self, call: Call) -> None:
        watched = call.watched
        theirs = Player(self.watch, call, ours=False)
        clean, failures = in_fork(partial(self._play_clean, watched, theirs)) or (in_fork(theirs.clean), [])
        if clean is None:
            self.in_vain[watched.qualname] = PLAYED_IN_VAIN
            return
        numbers = self._to_fail(watched, clean)
        self.covered |= {key for _, key in numbers}
        self.in_vain[watched.qualname] = 0 if numbers else self.in_vain[watched.qualname] + 1
        if not numbers:
            return
        before = theirs.state(in_words=False)
        ours = Ours(self.watch, call, before)
        for number, failure in self._failures(theirs, [n for n, _ in numbers], failures, clean, before):
            failed = clean.made[number].name
            if failure is None or failure.is_well:
                continue
            if ours.is_better(failed, failure) and not self._is_allowed(call, failed):
                self.found.append((call, self._sentence(call, theirs, number)))
                return

    def _play_clean(self, watched: Watched, theirs: "Player") -> tuple[Clean | None, list[Failure]]:
        """What happens when nothing fails, and when calls fail, as far as that can be seen in the same process."""
        before = theirs.state(in_words=False)
        if (clean := theirs.clean()) is None:
            return None, []
        numbers = [] if changes(before, clean.state) else [n for n, _ in self._to_fail(watched, clean)]
        return clean, theirs.failing_in_a_row(numbers, clean, before, is_fresh=False)

    def _failures(
        self, theirs: "Player", numbers: list[int], known: list[Failure], clean: Clean, before: Snapshot
    ) -> Iterator[tuple[int, Failure | None]]:
        """What happens when the call of each number fails; None where that cannot be told.   known: of the first"""
        yield from zip(numbers, known)
        ahead, is_in_a_row = numbers[len(known) :], True
        while ahead:
            row = ahead if is_in_a_row else ahead[:1]
            found = in_fork(partial(theirs.failing_in_a_row, row, clean, before))
            if found is None and len(row) > 1:  # one of them has no end, and nobody knows which
                is_in_a_row = False
                continue
            found = found or [None]
            yield from zip(row, found)
            ahead = ahead[len(found) :]

    def _is_allowed(self, call: Call, failed: str) -> bool:
        return self.table.allows("faults", call) or self.table.allows("faults", call, failed)

    def _to_fail(self, watched: Watched, clean: Clean) -> list[tuple[int, Key]]:
        """The last call of each place, where none was yet that was reached as often: once, or again."""
        last = {made.place: number for number, made in enumerate(clean.made)}
        times = Counter(made.place for made in clean.made)
        keys = {number: (watched.qualname, place, times[place] > 1) for place, number in last.items()}
        return [(number, key) for number, key in keys.items() if key not in self.covered]

    def _sentence(self, call: Call, theirs: "Player", number: int) -> str:
        clean, before = in_fork(partial(theirs.clean, in_words=True)), theirs.state(in_words=True)
        failure = in_fork(partial(theirs.failing, number, clean, before, in_words=True))
        name, failed = call.watched.name, clean.made[number].name
        if not failure.came_out:
            return f"{name}: an error in {failed} does not come out, {name} returns {failure.returned}"
        left = min(
            failure.left, key=lambda change: (change.is_of_identity, change.is_private, len(change.path))
        )
        said = f"{name}: an error in {failed} leaves a change behind, {left}"
        if failure.again:
            change = failure.again[0]
            said += f"; so {change.path} is {change.now} when it is called again, and not {change.before}"
        return said


class Ours:
    """What our own body does in the place of the learner's. It is asked only where that does not do well."""

    def __init__(self, watch: Watch, call: Call, before: Snapshot) -> None:
        self.player, self.before = Player(watch, call, ours=True), before
        self.failures: dict[str, list[Failure | None]] = {}

    def is_better(self, failed: str, than: Failure) -> bool:
        """Whether ours does better, whenever a call of that name fails in it. Not if it makes none."""
        if failed not in self.failures:
            self.failures[failed] = self._when(failed)
        failures = self.failures[failed]
        if not failures or None in failures:
            return False
        if not than.came_out:
            return all(one.came_out for one in failures)
        if than.is_seen and not any(one.is_seen for one in failures):
            return True
        return not than.can_repeat and all(one.can_repeat for one in failures)

    def _when(self, failed: str) -> list[Failure | None]:
        numbers = [n for n, made in enumerate(self.clean.made) if made.name == failed] if self.clean else []
        few = {*numbers[:1], *numbers[-1:]}
        return [in_fork(partial(self.player.failing, number, self.clean, self.before)) for number in few]

    @cached_property
    def clean(self) -> Clean | None:
        return in_fork(self.player.clean)


class Player:
    """Makes a call again, by the learner's body or ours, in a process that is thrown away afterwards."""

    def __init__(self, watch: Watch, call: Call, ours: bool) -> None:
        self.watch, self.call, self.ours = watch, call, ours

    def clean(self, in_words: bool = False) -> Clean | None:
        made: list[Made] = []
        try:
            outcome = self._play(made, in_words)
            return Clean(made, outcome, self.state(in_words))
        except (TooLarge, Waits):
            return None

    def failing(self, number: int, clean: Clean, before: Snapshot, in_words: bool = False) -> Failure | None:
        """Where the call of that number fails.   before: of all arguments"""
        fault = Fault(f"{clean.made[number].name} has failed")
        again: list[Change] = []
        try:
            outcome = self._play([], in_words, number, fault)
            state = self.state(in_words)
            left = changes(before, state)
            is_kept = not left or not changes(clean.state, state)
            if not is_kept:
                second = self._play([], in_words)
                again = changes(clean.outcome, second) + changes(clean.state, self.state(in_words))
        except (TooLarge, Waits):
            return None
        returned = words_of(next(iter(outcome.values()))) if outcome else ""
        is_seen = not is_kept and not all(change.is_private for change in left)
        shown = sorted(left, key=attrgetter("is_private"))[:MOST_CHANGES], again[:MOST_CHANGES]
        return Failure(not outcome, is_kept, is_seen, not again, returned, *shown)

    def failing_in_a_row(
        self, numbers: list[int], clean: Clean, before: Snapshot, is_fresh: bool = True
    ) -> list[Failure | None]:
        """What happens for the first numbers, up to one after which not everything is as before.

        is_fresh   whether nothing was played in this process yet. What does not look well after others is left out
        """
        found: list[Failure | None] = []
        for number in numbers:
            failure = self.failing(number, clean, before)
            is_well = failure is not None and failure.is_well
            if is_well or (is_fresh and not found):
                found.append(failure)
            if not is_well or failure.left or time.process_time() > MOST_CPU / 4:
                break
        return found

    def state(self, in_words: bool) -> Snapshot:
        hidden = "self" if self.call.watched.name in MADE_BY else None
        arguments = {name: value for name, value in self.call.arguments.items() if name != hidden}
        return snapshot(arguments, deep=True, in_words=in_words)

    def _play(
        self, made: list[Made], in_words: bool, fail_at: int | None = None, fault: Fault | None = None
    ) -> Snapshot:
        """What it returns or raises; empty where the fault comes out."""
        bodies = self.watch.bodies

        def on_call(place: int, function: Callable) -> Callable:
            if not may_fail(function):
                return function
            made.append(Made(place, name_of(function)))
            return fail if len(made) - 1 == fail_at else function

        def fail(*args: Any, **kwargs: Any) -> None:
            raise fault

        def instead(watched: Watched) -> Callable:
            """Of functions that the body calls: their own calls are not the body's."""

            def call(*args: Any, **kwargs: Any) -> Any:
                bodies.on_call, before = None, bodies.on_call
                try:
                    return ((self.ours and bodies.ours(watched)) or watched.function)(*args, **kwargs)
                finally:
                    bodies.on_call = before

            return call

        watched = self.call.watched
        body = bodies.ours(watched) if self.ours else bodies.theirs(watched)
        self.watch.instead, bodies.on_call = instead, on_call
        try:
            result = body(*self.call.args, **self.call.kwargs)
            result = finished(result) if inspect.iscoroutine(result) else result
        except Waits:
            raise
        except BaseException as error:
            if fault is not None and any(link is fault for link in chain(error)):
                return {}
            return snapshot({RESULT: f"{type(error).__name__}: {error}"}, deep=False, in_words=in_words)
        finally:
            self.watch.instead = bodies.on_call = None
        return snapshot({RESULT: result}, deep=True, in_words=in_words)


def finished(coroutine: Any) -> Any:
    """What it returns without a loop that runs. Waits where it cannot go on."""
    try:
        for _ in range(MOST_STEPS):
            if coroutine.send(None) is not None:
                break
    except StopIteration as end:
        return end.value
    raise Waits


def may_fail(function: Any) -> bool:
    """Whether it is the engine's, a test's or torch's. Of what Python brings nothing is expected to fail."""
    function = getattr(function, "func", function)  # of a partial
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.BuiltinMethodType) and owner is not None:
        if isinstance(owner, types.ModuleType):
            return owner.__name__.partition(".")[0] not in SAFE
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        kind = next((kind for kind in kinds if function.__name__ in kind.__dict__), kinds[0])
        return kind.__module__.partition(".")[0] not in SAFE
    if isinstance(function, type | types.FunctionType | types.MethodType):
        return (function.__module__ or "").partition(".")[0] not in SAFE
    return type(function).__module__.partition(".")[0] not in SAFE


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
