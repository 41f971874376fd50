"""Homes on a ring, and bounded loads (lab 10.5). The oracles: distances one by one, and all loads of a few engines."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest

from minivllm.policies import routing
from minivllm.policies.routing import BoundedLoads, ConsistentHashing, place_of
from minivllm.simulate.traffic import zipf_shares

pytestmark = pytest.mark.lab("10.5")

AROUND = 2**64


@dataclass
class Engine:
    """What a router may ask of one (`minivllm.policies.routing.Engine`). It has no adapter."""

    load: int

    def has(self, adapter_id):
        return False


def engines(*loads):
    return [Engine(load) for load in loads]


def by_distance(adapter_id, num_engines, points):
    """Engines by how far their nearest point lies ahead of the adapter's place."""
    start = place_of(f"adapter {adapter_id}")
    nearest = {
        number: min((place_of(f"engine {number}, point {p}") - start) % AROUND for p in range(points))
        for number in range(num_engines)
    }
    return sorted(nearest, key=nearest.get)


class TestHomes:
    @pytest.mark.parametrize(("num_engines", "points"), [(1, 3), (2, 1), (5, 1), (7, 8), (12, 64)])
    def test_are_all_engines_by_their_distance_ahead(self, num_engines, points):
        ring = ConsistentHashing(points)

        for adapter_id in range(1, 80):
            assert list(ring.homes(adapter_id, num_engines)) == by_distance(adapter_id, num_engines, points)

    def test_begin_behind_a_point_that_lies_at_the_very_place(self, monkeypatch):
        places = {"adapter 1": 50, "adapter 2": 99, "adapter 3": 10}
        places |= {"engine 0, point 0": 10, "engine 1, point 0": 50, "engine 2, point 0": 80}
        monkeypatch.setattr(routing, "place_of", places.__getitem__)
        ring = ConsistentHashing(points=1)

        assert [list(ring.homes(a, 3)) for a in (1, 2, 3)] == [[2, 0, 1], [0, 1, 2], [1, 2, 0]]

    def test_change_for_few_when_an_engine_comes_and_all_of_these_go_there(self):
        ring, adapters = ConsistentHashing(), range(1, 2001)

        before = [ring.homes(a, 8)[0] for a in adapters]
        after = [ring.homes(a, 9)[0] for a in adapters]

        moved = [new for old, new in zip(before, after) if old != new]
        assert set(moved) == {8}
        assert len(moved) / 2000 == pytest.approx(1 / 9, rel=0.35)
        assert min(np.bincount(before)) > 0.6 * 2000 / 8

    def test_are_found_again_when_an_engine_has_gone(self):
        ring = ConsistentHashing(16)
        before = [list(ring.homes(a, 4)) for a in range(50)]

        ring.homes(3, 5)

        assert [list(ring.homes(a, 4)) for a in range(50)] == before

    def test_are_looked_up_on_a_ring_that_is_made_once(self, monkeypatch):
        placed = []
        monkeypatch.setattr(routing, "place_of", lambda text: placed.append(text) or place_of(text))
        ring = ConsistentHashing(32)
        ring.homes(1, 6)
        placed.clear()

        ring.homes(2, 6)

        assert placed == ["adapter 2"]


class TestBoundedLoads:
    @pytest.mark.parametrize("most", [1.05, 1.25, 2.0])
    def test_give_the_first_home_that_is_not_full(self, most):
        route = BoundedLoads(most, points=4)

        for loads in itertools.product(range(5), repeat=3):
            for adapter_id in (1, 2, 3, 4):
                limit = most * (sum(loads) + 1) / 3
                free = [n for n in by_distance(adapter_id, 3, 4) if loads[n] < limit]
                assert route(adapter_id, engines(*loads)) == free[0]

    def test_leave_an_adapter_at_home_while_loads_are_even(self):
        route, home = BoundedLoads(), ConsistentHashing()

        for adapter_id in range(1, 60):
            assert route(adapter_id, engines(*[30] * 6)) == home(adapter_id, engines(*[30] * 6))

    @pytest.mark.parametrize("seed", range(3))
    def test_never_give_an_engine_more_than_its_bound(self, seed):
        route, loads = BoundedLoads(most=1.25), [0] * 6
        rng = np.random.default_rng(seed)
        gone_home = 0

        for number, adapter in enumerate(rng.choice(50, 1500, p=zipf_shares(50, 1.2)) + 1):
            chosen = route(int(adapter), engines(*loads))
            gone_home += chosen == by_distance(int(adapter), 6, 64)[0] if number % 50 == 0 else 0
            loads[chosen] += 1
            assert max(loads) <= math.ceil(1.25 * (number + 1) / 6)

        assert gone_home > 10  # of 30, and who is at home finds its adapter

    def test_send_base_which_is_everywhere_to_whoever_has_least_to_do(self):
        assert BoundedLoads()(0, engines(3, 1, 0, 2)) == 2
