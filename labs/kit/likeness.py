"""Which known mistakes a learner's failures look like, and how sure that is."""

import re
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from labs.kit.forks import SKIPPED, Job, Outcome, run
from labs.kit.limits import NO_END
from labs.kit.mutants import Mutant, mutants_of
from labs.kit.regions import Exercise, LabError

SURE = 0.9  # so much of what a mistake breaks must be broken in the same words, for it to be named
WORTH = 0.2  # and so much of what the learner's code fails: nearly every mistake is part of code that does nothing
NEAR = 0.7  # so much alike must the nearest be, for it to be offered: less has accused code that was right
IN_OTHER_NUMBERS = 0.5  # how alike two messages are that differ in nothing but numbers
LOOKED_AT = 5  # failures that every mistake is compared by at first
CLOSER = 5  # mistakes that are then compared by all
PAIRED = 3  # of these are tried together, two at a time
MOST_NAMED = 3
LIMIT = 5.0  # seconds that the tests of a mistake may compute
QUICK = 2.5  # that a few of them may, or all where the learner's code has no end either

_ADDRESS = re.compile("0x[0-9a-f]+")
_NUMBER = re.compile(r"(?<![A-Za-z_])-?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan\b|inf\b)")

# Failures that say all themselves: no known mistake is like them.
PLAIN = re.compile(
    r"(BdbQuit|NameError|UnboundLocalError|SystemExit|KeyboardInterrupt|Exit|MemoryError): "
    f"|your code skips the test|it starts a process|{SKIPPED}"
)

Failures = dict[str, str]  # test -> what it says; "" for what ended the tests


class Likeness(NamedTuple):
    """What one mistake, or two that were made together, have in common with what a learner's code fails.

    failing     the tests that they break
    contained   how much of what they break is broken in the learner's code, in the same words; 1 = all
    explained   how much of what is broken there they break, likewise
    """

    mistakes: tuple[Mutant, ...]
    failing: frozenset[str]
    contained: float
    explained: float

    @property
    def is_sure(self) -> bool:
        return self.contained >= SURE

    @property
    def is_all(self) -> bool:
        """Whether nothing else need be wrong."""
        return self.is_sure and self.explained >= SURE

    @property
    def alike(self) -> float:
        """From 0 to 1: the harmonic mean of the two."""
        both = self.contained + self.explained
        return 2 * self.contained * self.explained / both if both else 0.0


def is_plain(outcome: Outcome) -> bool:
    """Whether every failure says itself what is wrong, so that nothing is gained by a comparison."""
    return not outcome.trouble and all(PLAIN.match(result.message) for result in outcome.of("failed"))


def known_mistakes(exercise: Exercise) -> list[Mutant]:
    """Those that can be made in the code as it is; `lab mutants` tells of others."""
    return [mistake for mistake in mutants_of(exercise) if _applies(mistake)]


def likenesses(mistakes: list[Mutant], outcome: Outcome) -> list[Likeness]:
    """Mistakes that the failures contain, first those that explain most; else the nearest, if there is one near."""
    mine = _failures(outcome)
    limit = QUICK if any(NO_END in said for said in mine.values()) else LIMIT
    near = _nearest(mistakes, mine)
    alone = _compared([(mistake,) for mistake in near], mine, limit)
    sure = [one for one in alone if one.is_sure and one.explained >= WORTH]
    sure = [one for one in sure if not any(one.failing < other.failing for other in sure)]
    if not any(one.is_all for one in sure):
        pairs = [pair for pair in combinations(near[:PAIRED], 2) if _applies(_made_together(pair))]
        if both := [one for one in _compared(pairs, mine, limit) if one.is_all]:
            return both[:1]
    nearest = max(alone, key=lambda one: one.alike, default=None)
    return sure[:MOST_NAMED] or [nearest] * bool(nearest and nearest.alike >= NEAR)


def _nearest(mistakes: list[Mutant], mine: Failures) -> list[Mutant]:
    """A few that break most of a few of the tests, in the order in which they do."""
    tests = sorted(mine)
    some = frozenset(tests[:: -(-len(tests) // LOOKED_AT)]) if "" not in mine else None
    shared = {}
    for (mistake,), theirs in _broken([(mistake,) for mistake in mistakes], some, QUICK):
        shared[mistake.name] = _in_common(theirs, mine)
    named = sorted((m for m in mistakes if shared[m.name]), key=lambda m: -shared[m.name])
    return named[:CLOSER]


def _compared(candidates: list[tuple[Mutant, ...]], mine: Failures, limit: float) -> list[Likeness]:
    found = []
    for mistakes, theirs in _broken(candidates, None, limit):
        if common := _in_common(theirs, mine):
            found.append(Likeness(mistakes, frozenset(theirs), common / len(theirs), common / len(mine)))
    return sorted(found, key=lambda one: (-one.explained, -one.contained, one.mistakes[0].name))


def _broken(
    candidates: list[tuple[Mutant, ...]], only: frozenset[str] | None, limit: float
) -> Iterator[tuple[tuple[Mutant, ...], Failures]]:
    """What each breaks, of all tests or of some."""
    jobs = [
        Job(mistakes, mistakes[0].exercise.number, _made_together(mistakes).sources(), only=only)
        for mistakes in candidates
    ]
    for job, outcome in run(jobs, limit=limit) if jobs else ():
        yield job.key, _failures(outcome)


def _made_together(mistakes: tuple[Mutant, ...]) -> Mutant:
    return mistakes[0]._replace(edits=[edit for mistake in mistakes for edit in mistake.edits])


def _applies(mistake: Mutant) -> bool:
    try:
        return bool(mistake.sources())
    except LabError:
        return False


def _failures(outcome: Outcome) -> Failures:
    failures = {result.test: _ADDRESS.sub("", result.message) for result in outcome.of("failed", "todo")}
    return failures | ({"": outcome.trouble} if outcome.trouble else {})


def _in_common(theirs: Failures, mine: Failures) -> float:
    """How many tests fail in both with the same words; those with other numbers count for less."""
    return sum(_alike(theirs[test], mine[test]) for test in theirs.keys() & mine.keys())


def _alike(one: str, other: str) -> float:
    if one == other:
        return 1.0
    return IN_OTHER_NUMBERS if _NUMBER.sub("#", one) == _NUMBER.sub("#", other) else 0.0
