"""Adapters read beside the steps: in turn, for those who wait first, and never more than there is room for."""

from types import SimpleNamespace

import pytest

from minivllm.serving.read_policy import LOADING
from minivllm.simulate.adapters import RecordedWorker
from minivllm.simulate.reader import Reader
from tests.worlds.fleets import config

REQUESTS = [SimpleNamespace(adapter_id=adapter_id) for adapter_id in range(7)]


@pytest.fixture
def reader():
    """Three adapters at most for requests, and three ahead, a second each; requests wait for 1 to 4."""
    small = config(slots=2, memory=2)
    worker = RecordedWorker(small.lora, small.scheduler, dict.fromkeys(range(7), 8))
    queues = SimpleNamespace(in_flight=dict.fromkeys(range(1, 5), 1), running=[])
    return Reader(worker, queues, lambda adapter_id: 1.0, most=3)


def test_one_disk_reads_one_adapter_after_the_other(reader):
    said = [reader.why_wait(request) for request in REQUESTS[:4]]
    reader.settle(2.5)

    assert said == [None, LOADING, LOADING, LOADING]
    assert [reader.why_wait(request) for request in REQUESTS[:4]] == [None, None, None, LOADING]
    assert reader.next_there == 3.0 and reader.num_reads == 3


def test_readers_that_unpack_at_the_same_time_share_the_host(reader):
    reader.unpacking = lambda adapter_id: 5.0

    for request in REQUESTS[1:4]:
        reader.why_wait(request)

    # They begin at 1, 2 and 3. Until then the first had 1 s and half of another, the second the other half. So 3.5, 4.5
    # and 5 s are left.
    assert list(reader.reads.values()) == pytest.approx([3 + 3 * 3.5, 13.5 + 2 * 1.0, 15.5 + 0.5])


def test_a_read_that_begins_later_finds_others_with_what_is_left_of_their_work(reader):
    reader.seconds, reader.unpacking = lambda adapter_id: 0.0, lambda adapter_id: 4.0
    reader.why_wait(REQUESTS[1])
    reader.settle(1.0)
    reader.why_wait(REQUESTS[2])
    reader.settle(7.0)  # the first was through at 1 + 2 * 3, the second has 1 s left
    reader.why_wait(REQUESTS[3])

    assert reader.reads == pytest.approx({2: 9.0, 3: 12.0}) and reader.worker.done == {1}


def test_what_the_engine_does_beside_reads_takes_longer_and_so_do_they(reader):
    reader.seconds, reader.unpacking = lambda adapter_id: 0.0, lambda adapter_id: 4.0
    reader.why_wait(REQUESTS[1])

    through = reader.engine_works(1.0, 0.5)
    reader.settle(2.5)
    reader.why_wait(REQUESTS[2])

    # From 1 to 2 they share the host: of the first 2.5 s are left, and at 2.5 it has 2 s, beside the second's 4 s.
    assert through == pytest.approx(2.0) and reader.reads == pytest.approx({1: 6.5, 2: 8.5})


def test_what_the_engine_does_beside_no_read_takes_its_time(reader):
    assert reader.engine_works(1.0, 0.5) == 1.5 and not reader.reads


def test_where_there_is_no_room_to_read_the_step_reads(reader):
    for request in REQUESTS[1:4]:
        reader.why_wait(request)

    waits = reader.why_wait(REQUESTS[4])
    reader.settle(9.0)

    # None is not waiting any more: the request joins a step, which reads the adapter itself.
    assert waits == LOADING and reader.why_wait(REQUESTS[4]) is None
    assert not reader.is_there(4) and reader.num_reads == 3


def test_no_step_reads_while_others_run(reader):
    running = reader.queues.running
    for request in REQUESTS[1:4]:
        reader.why_wait(request)
    reader.settle(9.0)

    running.append(REQUESTS[5])  # has another adapter: those that have been read still wait
    waits = reader.why_wait(REQUESTS[4])
    running.append(REQUESTS[2])  # joins, and frees a place
    begins = reader.why_wait(REQUESTS[4])

    assert waits == begins == LOADING and reader.num_reads == 4 and set(reader.reads) == {4}


def test_what_nobody_waits_for_any_more_makes_room(reader):
    for request in REQUESTS[1:4]:
        reader.why_wait(request)
    reader.settle(9.0)
    for adapter_id in (1, 2):
        del reader.queues.in_flight[adapter_id]

    assert reader.why_wait(REQUESTS[4]) == LOADING
    assert reader.is_there(3) and not reader.is_there(1)


def test_what_is_wanted_ahead_holds_up_no_request(reader):
    reader.begin_ahead(1)
    reader.begin_ahead(6)
    reader.begin_ahead(2)

    assert set(reader.reads) == {1, 2}
    reader.settle(2.0)
    reader.begin_ahead(6)
    reader.settle(3.0)
    # What a request waits for stays until it joins; what none waits for is in memory.
    assert reader.worker.done == {1, 2} and list(reader.worker.manager.list_adapters()) == [6]


def test_what_is_wanted_ahead_takes_nobodys_place(reader):
    reader.queues.in_flight.update(dict.fromkeys((5, 6), 1))
    for adapter_id in (4, 5, 6):
        reader.begin_ahead(adapter_id)

    said = [reader.why_wait(request) for request in REQUESTS[1:4]]
    reader.settle(6.0)

    assert said == [LOADING] * 3 and reader.worker.done == {1, 2, 3, 4, 5, 6}
