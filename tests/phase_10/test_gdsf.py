"""Greedy dual size frequency (lab 10.2). The oracle works worth out anew from all that has happened."""

from fractions import Fraction

import numpy as np
import pytest

from minivllm.policies.keeping import GreedyDualSizeFrequency, PolicyCache
from minivllm.policies.replay import belady_hits, hits
from minivllm.simulate.traffic import zipf_shares

pytestmark = pytest.mark.lab("10.2")

COST = {key: 1 + 3 * key % 7 for key in range(12)}
SIZE = {key: 2 ** (key % 3) for key in range(12)}  # so that floats are exact


class Remembered:
    """All that happened, and what follows from it by the definition, in fractions."""

    def __init__(self):
        self.happened = []  # (what, key, the clock then)
        self.clock = Fraction(0)

    def note(self, what, key):
        self.happened.append((what, key, self.clock))

    def worth(self, key):
        gone = [i for i, (what, k, _) in enumerate(self.happened) if (what, k) == ("left", key)]
        uses = [e for e in self.happened[gone[-1] + 1 if gone else 0 :] if e[:2] == ("used", key)]
        return uses[-1][2] + Fraction(len(uses) * COST[key], SIZE[key])

    def victim(self, candidates):
        worths = [self.worth(key) for key in candidates]
        self.clock = min(worths)
        return candidates[worths.index(min(worths))]


def made(cost=COST.get, size=SIZE.get):
    return GreedyDualSizeFrequency(cost, size)


def test_who_is_worth_least_goes():
    policy = made({1: 8, 2: 6, 3: 20}.get, {1: 2, 2: 1, 3: 4}.get)

    for key in (1, 2, 3, 1):
        policy.used(key)

    # 1: two uses, 2 * 8 / 2 = 8. 2: 6 / 1 = 6. 3: 20 / 4 = 5.
    assert policy.victim([1, 2, 3]) == 3
    assert policy.clock == 5


def test_who_is_used_after_somebody_left_is_worth_more_by_what_that_one_was_worth():
    policy = made({1: 5, 2: 4, 3: 3}.get, lambda key: 1)
    for key in (1, 2):
        policy.used(key)

    assert policy.victim([1, 2]) == 2  # the clock is 4
    policy.left(2)
    policy.used(3)  # 4 + 3, and 1 is still 5

    assert policy.victim([1, 3]) == 1


def test_the_clock_jumps_to_what_the_last_one_was_worth():
    policy = made({1: 5, 2: 4, 3: 3, 4: 9}.get, lambda key: 1)
    for key in (1, 2):
        policy.used(key)
    clocks = []

    for there, new in (([1, 2], 3), ([1, 3], 4), ([3, 4], 2)):
        victim = policy.victim(there)
        policy.left(victim)
        policy.used(new)
        clocks.append((victim, policy.clock))

    assert clocks == [(2, 4), (1, 5), (3, 7)]  # 7 is 4 + 3


def test_of_several_that_are_worth_the_same_the_least_recently_used_goes():
    policy = made(lambda key: 2, lambda key: 1)
    for key in (4, 7, 5):
        policy.used(key)

    assert policy.victim([7, 4, 5]) == 7


def test_who_comes_back_begins_anew():
    policy = made(lambda key: 1, lambda key: 1)
    for key in (1, 1, 1, 2, 2):
        policy.used(key)

    policy.left(1)
    policy.used(1)

    assert policy.victim([1, 2]) == 1


def test_the_clock_goes_by_who_was_chosen_and_not_by_who_was_sent_away():
    policy = made(lambda key: 3, lambda key: 1)
    for key in (1, 2):
        policy.used(key)

    policy.left(1)

    assert policy.clock == 0
    assert policy.victim([2]) == 2
    assert policy.clock == 3


def test_of_who_has_left_nothing_is_kept():
    policy = made(lambda key: 1, lambda key: 1)

    for key in range(10_000):
        policy.used(key)
        policy.left(key)

    kept = {name: len(held) for name, held in vars(policy).items() if hasattr(held, "__len__") and held}
    assert kept == {}, "tables of the policy, and how many keys they have"


@pytest.mark.parametrize("what_grows", ["cost", "size"])
@pytest.mark.parametrize("leaves", [True, False])
def test_cost_and_size_are_those_of_the_last_use(what_grows, leaves):
    """An adapter that is read again may have become larger."""
    asked = {"cost": {1: 2, 2: 6}, "size": {1: 1, 2: 1}}
    policy = made(asked["cost"].get, asked["size"].get)
    for key in (1, 2):
        policy.used(key)

    if leaves:
        policy.left(1)
        policy.left(2)
    asked[what_grows][1 if what_grows == "cost" else 2] = 20
    for key in (1, 2):
        policy.used(key)

    # Cost 20 makes 1 worth 20 or, used twice, 40; size 20 makes 2 worth 0.3 or 0.6. Without, it is 1 that goes.
    assert policy.victim([1, 2]) == 2


def test_who_was_never_there_may_leave():
    made().left(3)


@pytest.mark.parametrize("seed", range(10))
def test_it_chooses_as_the_definition_does(seed):
    rng = np.random.default_rng(seed)
    policy, model, there = made(), Remembered(), []
    chosen = []

    for _ in range(300):
        key = int(rng.integers(12))
        if rng.random() < 0.08 and there:  # somebody is sent away
            gone = there.pop(int(rng.integers(len(there))))
            policy.left(gone)
            model.note("left", gone)
        if key not in there and len(there) == 5:
            spared = set(rng.choice(there, int(rng.integers(0, 3)), replace=False).tolist())
            candidates = [k for k in there if k not in spared]
            victim = policy.victim(candidates)
            assert victim == model.victim(candidates)
            chosen.append(victim)
            there.remove(victim)
            policy.left(victim)
            model.note("left", victim)
        there = [k for k in there if k != key] + [key]
        policy.used(key)
        model.note("used", key)

    assert len(set(chosen)) > 6


@pytest.mark.parametrize("seed", range(3))
def test_where_everybody_may_go_the_clock_never_falls(seed):
    policy, there, clocks = made(), [], []

    for key in np.random.default_rng(seed).integers(12, size=300).tolist():
        if key not in there and len(there) == 5:
            victim = policy.victim(there)
            there.remove(victim)
            policy.left(victim)
            clocks.append(policy.clock)
        there = [k for k in there if k != key] + [key]
        policy.used(key)

    assert clocks == sorted(clocks)
    assert len(set(clocks)) > 20


def test_what_was_worth_much_once_does_not_stay_for_ever():
    cache = PolicyCache(2, made(lambda key: 1.0, lambda key: 1.0))

    for key in [1] * 5 + list(range(2, 12)):
        cache.put(key, None)

    assert 1 not in cache


@pytest.mark.parametrize("capacity", [3, 12, 40])
def test_nobody_finds_more_than_who_knows_the_future(capacity):
    rng = np.random.default_rng(2)
    uses = rng.choice(60, 3000, p=zipf_shares(60, 0.9)).tolist()

    found = hits(uses, capacity, made(lambda key: 1.0, lambda key: 1.0))

    assert 0.3 * belady_hits(uses, capacity) < found <= belady_hits(uses, capacity)
