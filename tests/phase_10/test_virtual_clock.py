"""A clock that jumps (lab 10.1). The oracles: a clock that ticks, Lindley's recursion, Pollaczek and Khinchine."""

from dataclasses import replace

import numpy as np
import pytest
from fleets import Scripted, arrivals_of, config, fleet, scripted

from minivllm.policies.routing import least_loaded
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.traffic import Arrival

pytestmark = pytest.mark.lab("10.1")


def by_ticks(arrivals, replicas, until):
    """What scripted replicas are told, by a clock that stops at every second."""
    made, log = scripted(replicas)
    due, number_of_event = {}, 0

    def schedule(replica, time):
        nonlocal number_of_event
        number_of_event += 1
        due[replica.number] = time, number_of_event

    for now in range(until):
        for arrival in (one for one in arrivals if one.time_s == now):
            replica = made.replicas[least_loaded(0, made.replicas)]
            replica.add(arrival)
            if replica.output is None:
                schedule(replica, now)
        while ready := [(event, number) for number, (time, event) in due.items() if time == now]:
            replica = made.replicas[min(ready)[1]]
            del due[replica.number]
            if replica.output is not None:
                replica.end_step(now)
            seconds = replica.begin_step(now)
            if seconds is not None:
                schedule(replica, now + seconds)
            elif replica.wakes_at is not None:
                schedule(replica, replica.wakes_at)
    return log


class TestALoneReplica:
    def test_takes_one_step_after_the_other(self):
        made, log = scripted()

        made.serve(arrivals_of((3, 0, 5), (4, 0, 2), (20, 0, 1)))

        assert log == [
            *(("add", 3, 0), ("begin", 3, 0), ("add", 4, 0), ("end", 8, 0), ("begin", 8, 0)),
            *(("end", 10, 0), ("begin", 10, 0)),
            *(("add", 20, 0), ("begin", 20, 0), ("end", 21, 0), ("begin", 21, 0)),
        ]
        assert made.now == 21

    def test_begins_its_step_when_all_that_come_at_the_same_time_are_there(self):
        made, log = scripted()

        made.serve(arrivals_of((0, 0, 4), (4, 0, 1), (4, 0, 1)))

        assert [entry[0] for entry in log] == ["add", "begin", "add", "add", *["end", "begin"] * 3]

    def test_looks_again_when_it_wakes(self):
        made, log = scripted()

        made.serve(arrivals_of((1, 6, 2)))

        assert log == [("add", 1, 0), ("begin", 1, 0), ("begin", 7, 0), ("end", 9, 0), ("begin", 9, 0)]

    def test_that_somebody_woke_earlier_does_not_look_again_in_the_middle_of_a_step(self):
        made, log = scripted()

        made.serve(arrivals_of((1, 6, 2), (4, 0, 9)))

        assert [(what, time) for what, time, _ in log if what != "add"] == [
            *(("begin", 1), ("begin", 4)),
            *(("end", 13), ("begin", 13), ("end", 15), ("begin", 15)),
        ]

    def test_that_somebody_woke_earlier_does_not_move_the_clock_when_it_would_have_woken(self):
        """All has been served by 7. What it would have woken for at 31 was served with the rest."""
        made, log = scripted()
        replica = made.replicas[0]

        def add(arrival):  # the second one that comes has what the first one waits for
            replica.waiting = [replace(one, prompt_tokens=0) for one in replica.waiting]
            return Scripted.add(replica, arrival)

        replica.add = add
        made.serve(arrivals_of((1, 30, 2), (4, 0, 1)))

        assert log[-1] == ("begin", 7, 0)
        assert (made.now, made._events) == (7, [])

    def test_may_wake_at_zero(self):
        """Where the clock begins: what the request waits for, such as an empty file, takes no time."""
        made, log = scripted()
        replica = made.replicas[0]

        def begin_step(now):  # the first look finds nothing yet
            if len(log) == 1:
                log.append(("begin", now, 0))
                return None
            return Scripted.begin_step(replica, now)

        replica.begin_step = begin_step
        made.serve(arrivals_of((0, 0, 3)))

        assert log == [("add", 0, 0), ("begin", 0, 0), ("begin", 0, 0), ("end", 3, 0), ("begin", 3, 0)]

    def test_ends_a_step_that_takes_no_time(self):
        """The tokens of the step before are there already, and this step only hands them out."""
        made, log = scripted()

        made.serve(arrivals_of((2, 0, 0)))

        assert log == [("add", 2, 0), ("begin", 2, 0), ("end", 2, 0), ("begin", 2, 0)]

    def test_is_given_those_who_come_together_in_their_order(self):
        made, _ = scripted()
        arrivals = [
            Arrival(time, 0, 1, adapter) for time, adapter in ((0, 7), (0, 2), (0, None), (0, 5), (1, 1))
        ]

        made.serve(arrivals)

        assert [one.arrival for one in made.requests] == arrivals

    def test_has_no_event_without_requests(self):
        made, log = scripted()

        made.serve([])
        made.serve(arrivals_of((5, 0, 1)))

        assert log == [("add", 5, 0), ("begin", 5, 0), ("end", 6, 0), ("begin", 6, 0)]
        assert made._events == []


class TestReplicas:
    def test_of_the_same_time_have_their_turns_in_the_order_of_their_events(self):
        made, log = scripted(2, route=lambda adapter_id, replicas: made_for.pop(0))
        made_for = [1, 0, 0, 1]

        made.serve(arrivals_of((0, 0, 7), (2, 0, 5), (3, 0, 1), (3, 0, 1)))

        assert [number for what, time, number in log if (what, time) == ("end", 7)] == [1, 0]

    def test_hear_of_what_was_before_and_a_router_sees_it(self):
        loads = []

        def route(adapter_id, replicas):
            loads.append([replica.load for replica in replicas])
            return least_loaded(adapter_id, replicas)

        made, _ = scripted(2, route)
        made.serve(arrivals_of((0, 0, 4), (1, 0, 9), (4, 0, 1), (5, 0, 1), (11, 0, 1)))

        # At 4 the first step has not ended yet, for whoever comes at that time; at 5 it has.
        assert loads == [[0, 0], [1, 0], [1, 1], [1, 1], [0, 0]]

    @pytest.mark.parametrize("seed", range(12))
    def test_do_what_they_do_by_a_clock_that_ticks(self, seed):
        rng = np.random.default_rng(seed)
        replicas, count = int(rng.integers(1, 4)), 60
        times = np.sort(rng.integers(0, 90, count)).tolist()
        waits, steps = rng.choice([0, 0, 0, 3, 8], count).tolist(), rng.integers(1, 6, count).tolist()
        arrivals = arrivals_of(*zip(times, waits, steps))
        made, log = scripted(replicas)

        made.serve(arrivals)

        assert log == by_ticks(arrivals, replicas, until=500)
        assert made.now == max(time for _, time, _ in log)


class TestTheEngineOnTheClock:
    def test_mixes_who_is_there_when_a_step_begins(self):
        """A step is a second. At 0 two come and at 0.4 a third; at 2, when the second step ends, a fourth."""
        made = fleet()

        made.serve([Arrival(time, 4, 2, None) for time in (0.0, 0.0, 0.4, 2.0)])

        assert [(one.first_s, one.last_s) for one in made.requests] == [
            *((1.0, 2.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)),
        ]

    def test_waits_for_a_disk_beside_its_steps(self):
        """An adapter is read in 8 s; base, which comes meanwhile, needs no disk."""
        cost = CostModel({"steps": 1.0}, copy_bytes_per_s=1e12, read_bytes_per_s=1e5)
        made = fleet(cost=cost)

        made.serve([Arrival(0.0, 4, 2, 0), Arrival(3.0, 4, 3, None)])

        assert made.requests[0].first_s == pytest.approx(9.0, abs=1e-3)
        assert (made.requests[1].first_s, made.requests[1].last_s) == (4.0, 6.0)

    def test_waits_one_after_the_other_as_lindley_says(self):
        """With one request at a time the next one's wait is max(0, wait + service - gap)."""
        rng = np.random.default_rng(5)
        lengths, gaps = rng.choice([1, 2, 4, 9], 2000), rng.exponential(0.05, 2000)
        services, times = 0.01 * lengths, gaps.cumsum()
        made = fleet(config(max_num_seqs=1, blocks=50), CostModel({"steps": 0.01}), ranks=())

        made.serve(Arrival(t, 1, n, None) for t, n in zip(times.tolist(), lengths.tolist()))

        waits = [0.0]
        for service, gap in zip(services, gaps[1:]):
            waits.append(max(0.0, waits[-1] + service - gap))
        found = [one.last_s - one.arrival.time_s for one in made.requests]
        np.testing.assert_allclose(found, waits + services, atol=1e-9)

    def test_waits_as_long_on_average_as_pollaczek_and_khinchine_say(self):
        rng = np.random.default_rng(11)
        lengths = rng.choice([1, 2, 4], 12_000, p=[0.5, 0.3, 0.2])
        services = 0.01 * lengths
        rate = 0.5 / services.mean()
        times = rng.exponential(1 / rate, len(lengths)).cumsum()
        made = fleet(config(max_num_seqs=1, blocks=50), CostModel({"steps": 0.01}), ranks=())

        made.serve(Arrival(t, 1, n, None) for t, n in zip(times.tolist(), lengths.tolist()))

        waits = [one.last_s - one.arrival.time_s - 0.01 * one.arrival.output_tokens for one in made.requests]
        expected = rate * (services**2).mean() / (2 * (1 - rate * services.mean()))
        assert np.mean(waits) == pytest.approx(expected, rel=0.05)


def test_who_watches_hears_of_every_hundredth_arrival():
    made, _ = scripted()
    heard = []

    made.serve(arrivals_of(*((time, 0, 1) for time in range(250))), heard.append)

    assert heard == [100, 200]
