"""Which program of a launch touched what, and which of two accesses is sure to come first.

Two programs are in order only through an atomic: what one did before it released a place comes before what another
does after it acquired that place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

Place = tuple[int, int, int]  # of a program in the grid


class Access(NamedTuple):
    """One load, store or atomic of one program.

    period  how often the program had released something before
    seen    program -> the last of its periods that surely came before this
    """

    program: Place
    kind: Literal["read", "write", "change"]
    addresses: np.ndarray
    period: int
    seen: dict[Place, int]

    def comes_before(self, later: Access) -> bool:
        return later.seen.get(self.program, -1) >= self.period

    def clashes_with(self, other: Access) -> bool:
        return self.program != other.program and {self.kind, other.kind} not in ({"read"}, {"change"})


@dataclass
class Programs:
    """The programs of one launch, in the order in which they run.   accesses: all of them, likewise"""

    accesses: list[Access] = field(default_factory=list)
    now: Place = (0, 0, 0)
    released: dict[int, dict[Place, int]] = field(
        default_factory=dict
    )  # address -> what its releases had seen
    _period: int = 0
    _seen: dict[Place, int] = field(default_factory=dict)
    _unsettled: list[np.ndarray] = field(default_factory=list)  # written since the last barrier

    def begin(self, program: Place) -> None:
        self.now, self._period, self._seen, self._unsettled = program, 0, {}, []

    def barrier(self) -> None:
        self._unsettled = []

    def note(self, kind: Literal["read", "write", "change"], addresses: np.ndarray, order: str | None) -> str:
        """What is wrong with it among the program's own threads; "" if nothing is.

        order  of an atomic, as Triton names it
        """
        self.accesses.append(Access(self.now, kind, addresses, self._period, self._seen))
        if kind != "change" and any(np.isin(addresses, written).any() for written in self._unsettled):
            return f"{kind}s what its other threads have written, and no barrier is between"
        if kind == "write":
            self._unsettled.append(addresses)
        if kind == "change":
            if order in ("RELEASE", "ACQUIRE_RELEASE") and self._unsettled:
                return "releases what its other threads have written, and no barrier is between"
            self._synchronise(addresses.tolist(), order)
        return ""

    def _synchronise(self, addresses: list[int], order: str | None) -> None:
        if order in ("ACQUIRE", "ACQUIRE_RELEASE"):
            for address in addresses:
                self._seen = _later(self._seen, self.released.get(address, {}))
        if order in ("RELEASE", "ACQUIRE_RELEASE"):
            mine = {**self._seen, self.now: self._period}
            for address in addresses:
                self.released[address] = _later(self.released.get(address, {}), mine)
            self._period += 1


def _later(one: dict[Place, int], other: dict[Place, int]) -> dict[Place, int]:
    return {program: max(one.get(program, -1), other.get(program, -1)) for program in one | other}


def first_race(
    accesses: list[Access], may: list[Callable[[np.ndarray], np.ndarray]]
) -> tuple[Access, Access, int] | None:
    """Two accesses of unlike programs to one address, one of them a write, that nothing orders; and the address.

    may  which addresses may be raced for
    """
    changes = [access.addresses for access in accesses if access.kind != "read" and access.addresses.size]
    if not changes:
        return None
    written = np.unique(np.concatenate(changes))
    for ordinary in may:
        written = written[~ordinary(written)]
    programs = {program: i for i, program in enumerate({access.program: None for access in accesses})}
    addresses = np.concatenate([access.addresses for access in accesses])
    which = np.repeat(np.arange(len(accesses)), [len(access.addresses) for access in accesses])
    matters = np.isin(addresses, written)
    addresses, which = addresses[matters], which[matters]
    if not len(addresses):
        return None
    order = np.lexsort((which, addresses))
    addresses, which = addresses[order], which[order]
    who = np.array([programs[access.program] for access in accesses])[which]
    starts = np.flatnonzero(np.r_[True, addresses[1:] != addresses[:-1]])
    several = np.minimum.reduceat(who, starts) != np.maximum.reduceat(who, starts)
    seen = set()
    for i in np.flatnonzero(several):
        end = starts[i + 1] if i + 1 < len(starts) else len(which)
        together = tuple(dict.fromkeys(which[starts[i] : end].tolist()))
        if together in seen:  # most addresses have the same story
            continue
        seen.add(together)
        if pair := _unordered([accesses[j] for j in together]):
            return *pair, int(addresses[starts[i]])
    return None


def _unordered(story: list[Access]) -> tuple[Access, Access] | None:
    for j, later in enumerate(story):
        for earlier in story[:j]:
            if earlier.clashes_with(later) and not earlier.comes_before(later):
                return earlier, later
    return None
