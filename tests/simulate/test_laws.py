"""Laws that hold whatever is simulated: queueing theory, and the same again for the same seed."""

import json

import pytest

from minivllm.simulate import traffic as made
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.replica_config import Elastic
from minivllm.simulate.report import report
from minivllm.simulate.traffic import Arrival
from tests.tools.nights import by_day
from tests.worlds.fleets import config, fleet, traffic


def test_a_report_is_the_same_to_the_byte():
    texts = []
    for _ in range(2):
        made = fleet(replicas=2)
        made.serve(traffic())
        texts.append(json.dumps(report(made)))

    assert texts[0] == texts[1]


def every_traffic():
    """Each way to come with each way to choose an adapter; sessions, and all at once."""
    lengths = [Arrival(float(n), 20 + 7 * n % 90, 1 + 5 * n % 23, None) for n in range(150)]
    for times in made.TIMES:
        for whose in made.ADAPTERS:
            coming = made.with_times(lengths, times, rate=12.0, seed=4)
            yield f"{times}-{whose}", made.with_adapters(coming, whose, 6, 0.8, seed=5)
    yield "sessions", made.with_sessions(coming, turns=3, think_s=5)[:120]
    yield "at once", [made.replace(one, time_s=2.0, adapter=n % 6) for n, one in enumerate(lengths)]


MEMORIES = {
    "slots": config(),
    "pages": config(slots=4, blocks=80, elastic=Elastic(pages=3, blocks_a_page=10)),
}
TRAFFICS = dict(every_traffic())
AHEAD = CostModel(
    {"steps": 0.01, "tokens": 1e-4},
    read_s=0.05,
    unpack_s=0.05,
    launch_s=0.002,
    graph_tokens=64,
    kernels_s=0.02,
)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", by_day(TRAFFICS))
def test_everybody_is_served_once_and_nobody_idles_meanwhile(kind, memory):
    arrivals, fleet_of_two = TRAFFICS[kind], fleet(MEMORIES[memory], AHEAD, replicas=2)
    ended, begun = watched(fleet_of_two)

    fleet_of_two.serve(arrivals)

    assert [one.arrival for one in fleet_of_two.requests] == list(arrivals)
    assert sorted(map(id, ended)) == sorted(map(id, fleet_of_two.requests))
    assert all(one.arrival.time_s < one.first_s <= one.last_s for one in ended)
    sampled = sum(replica.scheduler.num_sampled_tokens for replica in fleet_of_two.replicas)
    assert sampled == sum(arrival.output_tokens for arrival in arrivals)
    # Whoever begins no step has nobody to serve, or waits for a disk.
    assert all(seconds is not None or not load or reading for seconds, load, reading in begun)


@pytest.mark.parametrize("kind", TRAFFICS)
def test_there_are_as_many_requests_as_come_in_the_time_that_one_is_there(kind):
    """Little's law, exactly: what is counted at every event, against what each request waited."""
    one = fleet(cost=AHEAD)
    (replica,) = one.replicas
    area, since, add, end_step = 0.0, 0.0, replica.add, replica.end_step

    def counted(now):
        nonlocal area, since
        area, since = area + replica.load * (now - since), now

    replica.add = lambda arrival: (counted(arrival.time_s), add(arrival))[1]
    replica.end_step = lambda now: (counted(now), end_step(now))[1]
    one.serve(TRAFFICS[kind])

    waited = sum(served.last_s - served.arrival.time_s for served in one.requests)
    assert area == pytest.approx(waited, rel=1e-9) and replica.load == 0


def watched(fleet_of_two):
    """Requests as they end, and of each beginning its seconds, how many were there, and what was being read."""
    ended, begun = [], []
    for replica in fleet_of_two.replicas:

        def begin(now, replica=replica, begin_step=replica.begin_step):
            seconds = begin_step(now)
            begun.append((seconds, replica.load, bool(replica.reader.reads)))
            return seconds

        def end(now, end_step=replica.end_step):
            found = end_step(now)
            ended.extend(found)
            return found

        replica.begin_step, replica.end_step = begin, end
    return ended, begun
