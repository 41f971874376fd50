"""The engine on a virtual clock: times by hand, everybody served, nothing but the arguments decides."""

import dataclasses

import pytest

from minivllm.policies import prefetching, routing, scheduling
from minivllm.policies.keeping import POLICIES as KEEPING
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.report import report
from minivllm.simulate.traffic import Arrival
from tests.tools.nights import by_day
from tests.worlds.fleets import COST, config, fleet, traffic


def served(arrivals, **options):
    made = fleet(**options)
    made.serve(arrivals)
    return made


def test_a_request_alone_takes_its_prompt_its_read_its_copy_and_its_tokens():
    cost = CostModel({"steps": 1.0, "tokens": 0.1}, 0.5, 1e6, 2.0, 1e5, concurrent_copies=False)

    (request,) = served([Arrival(10.0, 7, 3, 0)], cost=cost).requests

    # Rank 8 at 100,000 bytes each: 2 + 8 s to read, 0.5 + 0.8 s to copy; 1 + 0.7 s the prompt; 1.1 s a token.
    assert request.first_s == pytest.approx(10 + 10 + 1.3 + 1.7)
    assert request.last_s == pytest.approx(request.first_s + 2 * 1.1)


def test_a_read_goes_on_beside_the_steps_of_others():
    cost = CostModel({"steps": 1.0}, read_s=5.0, read_bytes_per_s=1e12, copy_bytes_per_s=1e12)
    arrivals = [Arrival(0.0, 4, 8, None), Arrival(0.0, 4, 1, 0)]

    base, adapter = served(arrivals, cost=cost).requests
    in_step = served(arrivals, cost=cost, replica=config(concurrent_reads=False)).requests

    assert base.last_s == pytest.approx(8.0)
    # Read by 5.0, seen by the step at 5.0, copied beside it, and computed in the next one.
    assert adapter.first_s == pytest.approx(7.0)
    assert [one.first_s for one in in_step] == pytest.approx([6.0, 6.0])


def test_a_turn_finds_its_session_in_the_prefix_cache():
    arrivals = [Arrival(0.0, 64, 33, 0, session=7), Arrival(100.0, 130, 2, 0, session=7)]

    made = served([*arrivals, Arrival(200.0, 130, 2, 1, session=7), Arrival(300.0, 130, 2, 0)])

    # 96 tokens of the first turn were computed: six blocks of 16. Nobody else's are of use.
    assert made.replicas[0].scheduler.kv_cache.prefix_cache_stats.hits == 96


@pytest.mark.parametrize("scheduling_policy", scheduling.POLICIES)
@pytest.mark.parametrize("keeping_policy", by_day(KEEPING))
def test_everybody_gets_all_tokens_under_any_policy(scheduling_policy, keeping_policy):
    arrivals = traffic(rate=20.0)
    replica = config(
        blocks=60, keeping=KEEPING[keeping_policy], scheduling=scheduling.POLICIES[scheduling_policy]
    )

    made = served(arrivals, replica=replica, ranks=(4, 8, 16, 4, 8, 16))

    assert [one.arrival for one in made.requests] == arrivals
    assert all(one.arrival.time_s < one.first_s <= one.last_s for one in made.requests)
    assert made.replicas[0].scheduler.num_sampled_tokens == sum(a.output_tokens for a in arrivals)
    assert not made.replicas[0].scheduler.requests and report(made)["copies"] > 6


def test_reading_on_arrival_hides_reads_behind_the_queue():
    arrivals, cost = traffic(rate=30.0), dataclasses.replace(COST, read_s=0.2)

    asked, ahead = (
        report(served(arrivals, cost=cost, replica=config(prefetching=policy)))
        for policy in (None, prefetching.POLICIES["arrival"])
    )

    assert ahead["ttft_p50_ms"] < asked["ttft_p50_ms"]


@pytest.mark.parametrize("route", routing.POLICIES)
def test_a_fleet_serves_everybody_and_says_the_same_again(route):
    reports = []
    for _ in range(2):
        made = served(
            traffic(rate=30.0, adapters=20), ranks=(8,) * 20, replicas=3, route=routing.POLICIES[route](5)
        )
        assert {one.replica for one in made.requests} == {0, 1, 2}
        reports.append(report(made))

    assert reports[0] == reports[1]


def test_work_beyond_the_kv_cache_is_refused_by_name():
    with pytest.raises(ValueError, match="KV"):
        served([Arrival(0.0, 16 * 400, 100, None)])
