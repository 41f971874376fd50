"""A call leaves its arguments as they were, and what it gives or keeps is not the caller's own.

Of arguments it looks at data: numbers, tensors, arrays, containers, dataclasses. Three things are found: an argument
that has changed; memory, a list, a dict or a set of an argument's in the result or in what a constructor has made; and
such a one that a method has kept in its object. A result is also looked at by itself: no tensor's elements lie in the
same memory, as `expand` makes them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from labs.kit.generic.snapshots import (
    CHANGEABLE,
    NUMBERS,
    PLAIN,
    RESULT,
    Seen,
    Snapshot,
    TooLarge,
    changes,
    objects,
    snapshot,
)
from labs.kit.generic.table import Table
from labs.kit.generic.watching import MADE_BY, Call, Watch

LOOKED_INTO = 2  # calls of a function in a test of which the objects are searched for what they share


class SharedMemory:
    """found: calls, with a sentence on what is wrong"""

    title = "test_arguments_stay_as_they_were_and_nobody_else_holds_them"

    def __init__(self, watch: Watch, table: Table) -> None:
        self.watch, self.table = watch, table
        self.found: list[tuple[Call, str]] = []

    def before(self, call: Call) -> "_Before | None":
        """None for a helper of the learner's: what it is given is its caller's, who is looked at."""
        if not self.watch.bodies.has(call.watched):
            return None
        try:
            return _Before(snapshot(self._data(call), deep=False), *self._held(call))
        except TooLarge:
            return None

    def after(self, call: Call, kept: "_Before | None") -> None:
        if kept is None or self.found:
            return
        name = call.watched.name
        try:
            changed = changes(kept.data, snapshot(self._data(call), deep=False))
            said = [f"{name} changed its argument {change}; make a copy" for change in changed[:1]]
            if call.error is None and call.number <= LOOKED_INTO:
                said += [f"{name}: {sentence}" for sentence in (*self._shared(call), *self._kept(call, kept))]
        except TooLarge:
            return
        self.found += [(call, sentence) for sentence in said[:1]]

    def _data(self, call: Call) -> dict[str, Any]:
        """What must stay as it is. Of `self` nothing must: a method may change it."""
        return {
            name: value
            for name, value in call.arguments.items()
            if name != "self" and not self.table.allows("arguments", call, name)
        }

    def _shared(self, call: Call) -> Iterator[str]:
        """What of the result is an argument's, or lies in the same memory, in sentences."""
        makes_self = call.watched.name in MADE_BY
        result = call.arguments["self"] if makes_self else call.result
        if isinstance(result, PLAIN) or self.table.allows("result", call):
            return
        given: Seen = {}
        for _ in objects(_others(call), deep=True, seen=given):
            pass
        theirs = set(given)
        memory = {where: path for path, value in given.values() if (where := _memory(value))}
        if not makes_self:  # what is in `self` may be in the result
            for _ in objects({"self": call.arguments.get("self")}, deep=True, seen=given):
                pass
        for path, value, same_as in objects({RESULT: result}, deep=True, seen=given):
            if isinstance(value, NUMBERS) and _overlaps_itself(value):
                yield f"elements of {path} lie in the same memory, as `expand` makes them; make room for each"
            if isinstance(value, CHANGEABLE) and id(value) in theirs:
                yield f"{path} is no copy of {same_as}, but the same {type(value).__name__}"
            elif isinstance(value, CHANGEABLE) and same_as is not None and same_as.startswith(RESULT):
                yield f"{path} and {same_as} are one {type(value).__name__}"
            elif same_as is None and _memory(value) in memory:
                yield f"{path} shares its memory with {memory[_memory(value)]}; make a copy"

    def _held(self, call: Call) -> tuple[Seen, Seen]:
        """What a method's object holds, and what of the arguments' data it might come to hold."""
        own: Seen = {}
        given: Seen = {}
        is_asked = call.watched.is_method and call.watched.name not in MADE_BY and call.number <= LOOKED_INTO
        if is_asked and not self.table.allows("kept", call):
            for _ in objects({"self": call.arguments["self"]}, deep=True, seen=own):
                pass
            for _ in objects(_others(call), deep=False, seen=given):
                pass
        return own, given

    def _kept(self, call: Call, before: "_Before") -> Iterator[str]:
        """What of an argument's data its object holds now, and did not before."""
        new = {
            number: path
            for number, (path, value) in before.given.items()
            if isinstance(value, CHANGEABLE) and number not in before.own
        }
        for path, value, same_as in objects({"self": call.arguments["self"]}, deep=True) if new else ():
            if same_as is None and id(value) in new:
                yield f"{path} is no copy of {new[id(value)]}, but the same {type(value).__name__}"


class _Before(NamedTuple):
    """data: of the arguments; own, given: see `_held`"""

    data: Snapshot
    own: Seen
    given: Seen


def _others(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.arguments.items() if name != "self"}


def _memory(value: Any) -> int | None:
    """Where a tensor's or an array's memory begins; None for what has none."""
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0] if value.size else None
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return None
    return None if value.is_meta else value.untyped_storage().data_ptr() or None


def _overlaps_itself(value: torch.Tensor | np.ndarray) -> bool:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return False
    strides = value.stride() if isinstance(value, torch.Tensor) else value.strides
    return any(size > 1 and stride == 0 for size, stride in zip(value.shape, strides))
