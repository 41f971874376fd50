"""What policies promise, held against brute force and against the worst traffic."""

from types import SimpleNamespace

import numpy as np
import pytest

from minivllm.policies import keeping, scheduling
from minivllm.policies.keeping import GreedyDualSizeFrequency, LeastFrequentlyUsed, LeastRecentlyUsed
from minivllm.policies.replay import belady_hits, hits
from minivllm.policies.routing import AdapterAffine, least_loaded
from minivllm.policies.scheduling import BoundedOvertaking
from minivllm.simulate.traffic import Arrival, zipf_shares
from tests.worlds.fleets import config, fleet, traffic


def most_hits(uses, capacity, held=frozenset()):
    """By trying all that can be dropped at each miss."""
    if not uses:
        return 0
    key, later = uses[0], uses[1:]
    if key in held:
        return 1 + most_hits(later, capacity, held)
    if len(held) < capacity:
        return most_hits(later, capacity, held | {key})
    return max(most_hits(later, capacity, held - {victim} | {key}) for victim in held)


@pytest.mark.parametrize("seed", range(40))
def test_belady_finds_the_most_that_can_be_found(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 4))
    uses = rng.integers(1, 6, size=11).tolist()

    assert belady_hits(uses, capacity) == most_hits(uses, capacity)


@pytest.mark.parametrize("name", keeping.POLICIES)
@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.2])
def test_nobody_beats_belady(name, alpha):
    rng = np.random.default_rng(4)
    uses = rng.choice(60, 4000, p=zipf_shares(60, alpha)).tolist()

    for capacity in (1, 7, 30, 60):
        found = hits(uses, capacity, keeping.POLICIES[name](lambda key: 1.0 + key % 4))
        assert found <= belady_hits(uses, capacity)
        assert capacity < 60 or found == 4000 - len(set(uses))


def test_who_goes_is_the_policys_choice():
    # Of 1 (three uses), 2 and 3 (one use each), the fourth drops one.
    uses = [1, 1, 1, 2, 3, 4]

    def left(policy):
        cache = keeping.PolicyCache(3, policy)
        for key in uses:
            cache.put(key, None)
        return set(cache)

    assert left(LeastRecentlyUsed()) == {2, 3, 4}
    assert left(LeastFrequentlyUsed()) == {1, 3, 4}
    assert left(GreedyDualSizeFrequency({1: 1, 2: 9, 3: 2, 4: 1}.get)) == {1, 2, 4}  # worth 3, 9 and 2
    assert left(GreedyDualSizeFrequency(lambda key: 1.0, {1: 6, 2: 1, 3: 1, 4: 1}.get)) == {2, 3, 4}


def test_uses_of_a_key_that_has_left_count_no_more():
    cache = keeping.PolicyCache(2, LeastFrequentlyUsed())
    for key in [1, 1, 1, 2, 2]:
        cache.put(key, None)
    cache.pop(1)

    for key in (1, 3):
        cache.put(key, None)

    assert set(cache) == {2, 3}, "1 had one use since it came, 2 had two"


def test_what_was_worth_much_once_does_not_stay_for_ever():
    cache = keeping.PolicyCache(2, GreedyDualSizeFrequency(lambda key: 1.0))

    for key in [1] * 5 + list(range(2, 12)):
        cache.put(key, None)

    assert 1 not in cache
    assert hits([1] * 5 + list(range(2, 12)) + [1], 2, LeastFrequentlyUsed()) == 5  # which keeps it


def test_a_spared_key_stays_and_a_full_cache_says_so():
    cache = keeping.PolicyCache(2, LeastFrequentlyUsed())
    cache.put(1, None)
    cache.put(2, None)
    cache.touch(2)

    assert cache.remove_oldest(spare={1}) == (2, None)
    with pytest.raises(RuntimeError, match=r"it holds .1., of which .1. must stay"):
        cache.remove_oldest(spare={1})


class Engines:
    """What routers see."""

    @staticmethod
    def of(*loads, having=()):
        return [
            SimpleNamespace(load=load, has=lambda adapter_id, n=n: n in having)
            for n, load in enumerate(loads)
        ]


def test_an_adapter_stays_where_it_is_until_another_engine_has_far_less_to_do():
    route = AdapterAffine(spill=8)

    assert route(3, Engines.of(9, 1, 4, having={0, 2})) == 2
    assert route(3, Engines.of(9, 1, 4, having={0})) == 0
    assert route(3, Engines.of(10, 1, 4, having={0})) == 1
    assert route(3, Engines.of(9, 1, 4)) == route(0, Engines.of(9, 1, 4, having={0})) == 1
    assert least_loaded(3, Engines.of(2, 1, 1)) == 1


@pytest.mark.parametrize("name", ["adapter-affine", "rank-aware", "shortest-first"])
@pytest.mark.parametrize("patience", [4, 20])
def test_nobody_is_overtaken_by_more_than_was_promised(name, patience):
    ranks, order = (4, 64, 8, 32, 16, 4), []
    make = scheduling.POLICIES[name]

    def patient(ranks):
        policy = make(ranks)
        return BoundedOvertaking(policy.handicap, patience)

    made = fleet(
        config(slots=6, memory=6, max_num_seqs=2, scheduling=patient, max_model_len=512), ranks=ranks
    )
    scheduler = made.replicas[0].scheduler
    admit = scheduler._admit

    def noted(request, output):
        if joins := admit(request, output):
            order.append(request.arrival_order)
        return joins

    scheduler._admit = noted
    # All adapters are in memory, so that slots and reads keep nobody waiting.
    warm = [Arrival(number / 1000, 4, 1, number) for number in range(6)]
    made.serve([*warm, *(a for a in traffic(rate=60.0) if a.time_s > 0.01)])

    places = {arrival: place for place, arrival in enumerate(order)}
    worst = max(
        sum(places[later] < places[arrival] for later in range(arrival + 1, len(order)))
        for arrival in range(6, len(order))
    )
    assert 0 < worst <= patience


@pytest.mark.parametrize("wait", [4, 12])
@pytest.mark.parametrize("name", scheduling.POLICIES)
def test_an_adapter_waits_for_a_slot_no_longer_than_it_must(name, wait):
    made = fleet(config(slots=2, memory=6, max_num_seqs=8, wait=wait, scheduling=scheduling.POLICIES[name]))
    waits, scheduler = [], made.replicas[0].scheduler
    schedule = scheduler.schedule

    def watched():
        output = schedule()
        waits.extend(scheduler.waiting.waited(a) for a in scheduler.waiting.adapters)
        return output

    scheduler.schedule = watched
    made.serve(traffic(rate=40.0))

    # Six adapters want two slots: whoever is due goes first, and two turns of `wait` steps may be before its own.
    assert wait <= max(waits) <= 4 * wait
