"""What policies promise, held against brute force and against the worst traffic."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from small import config, fleet, traffic

from minivllm.policies import keeping, scheduling
from minivllm.policies.keeping import GreedyDualSizeFrequency, LeastFrequentlyUsed, LeastRecentlyUsed
from minivllm.policies.replay import belady_hits, hits
from minivllm.policies.routing import AdapterAffine, BoundedLoads, ConsistentHashing, least_loaded
from minivllm.policies.scheduling import BoundedOvertaking, VirtualTokenCounter
from minivllm.simulate.replica import ReplicaConfig
from minivllm.simulate.traffic import Arrival, zipf_shares


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


def test_with_one_engine_more_few_adapters_move():
    route, adapters = ConsistentHashing(), range(1, 2001)

    before = [route(a, Engines.of(*[0] * 8)) for a in adapters]
    after = [route(a, Engines.of(*[0] * 9)) for a in adapters]

    moved = [new for old, new in zip(before, after) if old != new]
    assert set(moved) == {8}  # to the new one alone
    assert len(moved) / 2000 == pytest.approx(1 / 9, rel=0.35)
    assert min(np.bincount(before)) > 0.6 * 2000 / 8


def test_no_engine_gets_more_than_its_bound():
    route, loads = BoundedLoads(most=1.25), [0] * 6
    rng = np.random.default_rng(0)

    for number, adapter in enumerate(rng.choice(50, 3000, p=zipf_shares(50, 1.2)) + 1):
        loads[route(int(adapter), Engines.of(*loads))] += 1

        assert max(loads) <= np.ceil(1.25 * (number + 1) / 6)


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


@pytest.mark.parametrize("name", scheduling.POLICIES)
def test_an_adapter_waits_for_a_slot_no_longer_than_it_must(name):
    wait = 12
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


W_PROMPT, W_ANSWER = 1.0, 2.0


def service_gap(policy, arrivals, ranks, tokens, blocks):
    """The largest difference of two adapters' services over any time in which both have requests waiting."""
    made = fleet(
        ReplicaConfig(
            scheduler=config(tokens=tokens, max_num_seqs=6).scheduler,
            cache=config(blocks=blocks).cache,
            lora=config(slots=len(ranks), memory=len(ranks)).lora,
            reads_beside=False,
            scheduling=policy,
        ),
        ranks=ranks,
    )
    scheduler = made.replicas[0].scheduler
    service, history, update = {}, [], scheduler.update_from_output

    def watched(output, sampled):
        for s in output.scheduled:
            adapter = s.request.adapter_id
            if s.request.request_id in output.cached_tokens:
                service[adapter] = service.get(adapter, 0) + W_PROMPT * s.request.num_prompt_tokens
            if s.samples:
                service[adapter] = service.get(adapter, 0) + W_ANSWER
        answered = update(output, sampled)
        history.append((dict(service), set(scheduler.waiting.adapters)))
        return answered

    scheduler.update_from_output = watched
    made.serve(arrivals)
    largest = 0.0
    for a, b in itertools.combinations(range(1, len(ranks) + 1), 2):
        gaps = []
        for counted, waiting in history:
            if {a, b} <= waiting:
                gaps.append(counted.get(a, 0) - counted.get(b, 0))
                largest = max(largest, max(gaps) - min(gaps))
            else:
                gaps = []
    return largest


def greedy_and_modest(seed):
    """One adapter asks for far more than the others, in long requests; one comes after a pause; one stops and goes."""
    rng = np.random.default_rng(seed)
    flood = [Arrival(i * 0.01, 60, 40, 0) for i in range(150)]
    modest = [Arrival(i * 0.05, int(rng.integers(4, 30)), int(rng.integers(2, 20)), 1) for i in range(120)]
    late = [Arrival(3 + i * 0.02, 20, 10, 2) for i in range(100)]
    on_off = [Arrival(i // 20 * 1.5 + i % 20 * 0.01, 10, 30, 3) for i in range(80)]
    return sorted([*flood, *modest, *late, *on_off], key=lambda arrival: arrival.time_s)


@pytest.mark.parametrize("seed", range(4))
def test_the_virtual_token_counter_keeps_its_bound(seed):
    # Theorem 4.4 of Sheng et al.: 2 max(w_p L, w_q M), M tokens of the KV cache.
    blocks, longest = 60, 60
    bound = 2 * max(W_PROMPT * longest, W_ANSWER * blocks * 16)
    arrivals = greedy_and_modest(seed)

    fair = service_gap(lambda ranks: VirtualTokenCounter(), arrivals, (8,) * 4, 128, blocks)
    unfair = service_gap(None, arrivals, (8,) * 4, 128, blocks)

    assert 0 < fair <= bound
    assert unfair > 2 * fair


def test_weights_share_out_what_adapters_get():
    arrivals = sorted(
        (Arrival(i * 0.01, 20, 20, adapter) for adapter in (0, 1) for i in range(200)),
        key=lambda arrival: arrival.time_s,
    )
    made = fleet(
        config(slots=2, max_num_seqs=4, scheduling=lambda ranks: VirtualTokenCounter({1: 3.0})), ranks=(8, 8)
    )
    made.serve(arrivals)

    # Until the heavier one has all of its 200, the other one gets a third of that.
    last = max(one.last_s for one in made.requests if one.arrival.adapter == 0)
    others = sum(one.last_s <= last for one in made.requests if one.arrival.adapter == 1)
    assert others == pytest.approx(200 / 3, abs=8)
