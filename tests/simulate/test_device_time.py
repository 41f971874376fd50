"""A device beside its host: steps and copies in order, one step ahead, and adapters in pages."""

import pytest

from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.device_time import DeviceTime
from minivllm.simulate.replica_config import Elastic
from minivllm.simulate.traffic import Arrival
from tests.worlds.fleets import config, fleet

# The host takes a quarter of a second to launch, the device a second to compute.
COST = CostModel({"steps": 1.0}, launch_s=0.25, graph_tokens=64)
WITHOUT_GRAPHS = CostModel({"steps": 1.0}, launch_s=0.25)


def served(arrivals, cost=COST):
    made = fleet(config(concurrent_reads=False), cost)
    made.serve(arrivals)
    return made


def test_a_step_waits_for_the_step_before_and_for_its_own_adapters():
    device = DeviceTime()
    device.run(1.0, 2.0, [7])
    device.copy(8, begins=1.0, seconds=3.0)
    device.copy(9, begins=1.0, seconds=1.0)  # over the same link: from 4 to 5

    device.run(1.5, 0.5, [7])
    assert device.free_at == 3.5  # it began at 3

    device.run(3.0, 0.5, [7, 8])
    assert device.free_at == 4.5  # it began at 4

    device.run(4.0, 0.5, [9])
    assert device.free_at == 5.5


def test_one_step_ahead_the_device_never_waits_for_the_host():
    arrivals = [Arrival(0.0, 4, 3, None)]

    (ahead,) = served(arrivals).requests
    (waiting,) = served(arrivals, cost=WITHOUT_GRAPHS).requests

    assert (waiting.first_s, waiting.last_s) == pytest.approx((1.25, 3.75))
    assert (ahead.first_s, ahead.last_s) == pytest.approx((1.25, 3.25))


def test_who_comes_while_a_call_waits_joins_the_call_after():
    # Calls begin at 0, 0.25 and 1.25; the third one's step is computed from 2.25, and read by the fourth call.
    requests = served([Arrival(0.0, 4, 9, None), Arrival(0.3, 4, 1, None)]).requests

    assert requests[1].first_s == pytest.approx(3.25)


def test_a_step_that_is_no_graph_is_launched_when_the_one_before_was_read():
    cost = CostModel({"steps": 1.0}, launch_s=0.25, graph_tokens=10)

    requests = served([Arrival(0.0, 4, 9, None), Arrival(0.3, 20, 2, None)], cost=cost).requests

    # The first request's second step runs from 1.25 to 2.25. Then comes the long prompt, for which nothing had been
    # launched. While it is computed, the step after it is.
    assert requests[1].first_s == pytest.approx(3.25)
    assert requests[1].last_s == pytest.approx(4.25)


@pytest.mark.parametrize(("kernels_s", "first", "last"), [(0.5, 3.25, 4.25), (3.0, 5.5, 6.5)])
def test_a_step_that_is_no_graph_takes_as_long_as_the_host_launches_its_kernels(kernels_s, first, last):
    cost = CostModel({"steps": 1.0}, launch_s=0.25, graph_tokens=10, kernels_s=kernels_s)

    requests = served([Arrival(0.0, 4, 9, None), Arrival(0.3, 20, 2, None)], cost=cost).requests

    # From 2.25 on the host launches. Who waits for the device hears of it at 3.25; who waits for the host when the next
    # step is launched, too.
    assert requests[1].first_s == pytest.approx(first)
    assert requests[1].last_s == pytest.approx(last)


def test_a_copy_beside_a_step_slows_it_and_only_its_own_rows_wait_for_it():
    cost = CostModel({"steps": 1.0}, copy_s=3.0, copy_bytes_per_s=1e12, slowed_s=0.5, read_bytes_per_s=1e12)
    warm = [Arrival(0.0, 4, 1, 0), Arrival(10.0, 4, 1, 1), Arrival(20.0, 4, 1, 2)]  # two slots: 1 and 2 stay
    arrivals = [*warm, Arrival(30.0, 4, 9, 2), Arrival(30.1, 4, 1, 0)]

    *_, running, newcomer = served(arrivals, cost=cost).requests

    # The step at 31 takes 1.5 for the copy that goes on beside it, from 31 to 34. The next one needs the adapter.
    assert newcomer.first_s == pytest.approx(35.0)
    assert running.last_s == pytest.approx(30 + 1 + 1.5 + 2.5 + 6)


def test_adapters_in_pages_share_memory_with_kv_blocks():
    # Three pages of their own, and each adapter takes two; the fourth page is borrowed from blocks that are free.
    elastic = Elastic(pages=3, blocks_a_page=10)
    arrivals = [Arrival(0.0, 4, 4, 0), Arrival(0.0, 4, 4, 1)]

    replica_config = config(slots=4, memory=6, blocks=40, elastic=elastic, concurrent_reads=False)
    made = fleet(replica_config, ranks=(16,) * 6)
    made.serve(arrivals)
    (replica,) = made.replicas

    assert {one.last_s for one in made.requests} == {made.now}  # side by side
    ledger, pool = replica.manager.pool.ledger, replica.scheduler.kv_cache.block_pool
    assert ledger.count == 3 + 4 and sorted(map(len, ledger.held.values())) == [2, 2]
    assert pool.num_lent == 10 and len(pool.free) == 29

    made.serve([Arrival(9.0, 500, 4, None)])  # 32 blocks: an adapter that nobody uses gives way

    assert pool.num_lent == 0 and sorted(map(len, ledger.held.values())) == [2]
