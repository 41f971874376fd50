"""Adapters read beside the steps: in turn, for those who wait first, and never more than there is room for."""

from types import SimpleNamespace

import pytest
from small import config

from minivllm.simulate.adapters import RecordedWorker
from minivllm.simulate.reader import LOADING, Reader

REQUESTS = [SimpleNamespace(adapter_id=adapter_id) for adapter_id in range(7)]


@pytest.fixture
def reader():
    """Three adapters at most, a second each; requests wait for 1 to 4."""
    small = config(slots=2, memory=2)
    worker = RecordedWorker(small.lora, small.scheduler, dict.fromkeys(range(7), 8))
    return Reader(worker, dict.fromkeys(range(1, 5), 1), lambda adapter_id: 1.0, most=3)


def test_one_disk_reads_one_adapter_after_the_other(reader):
    said = [reader.may_run(request) for request in REQUESTS[:4]]
    reader.settle(2.5)

    assert said == [None, LOADING, LOADING, LOADING]
    assert [reader.may_run(request) for request in REQUESTS[:4]] == [None, None, None, LOADING]
    assert reader.next_there == 3.0 and reader.num_reads == 3


def test_readers_unpack_side_by_side_what_the_disk_read_in_turn(reader):
    reader.unpack_s = 5.0

    for request in REQUESTS[1:4]:
        reader.may_run(request)

    assert list(reader.reads.values()) == [6.0, 7.0, 8.0]


def test_where_there_is_no_room_to_read_the_step_reads(reader):
    for request in REQUESTS[1:4]:
        reader.may_run(request)

    waits = reader.may_run(REQUESTS[4])
    reader.settle(9.0)

    assert waits == LOADING and reader.may_run(REQUESTS[4]) is None
    assert not reader.is_there(4) and reader.num_reads == 3


def test_what_nobody_waits_for_any_more_makes_room(reader):
    for request in REQUESTS[1:4]:
        reader.may_run(request)
    reader.settle(9.0)
    for adapter_id in (1, 2):
        del reader.in_flight[adapter_id]

    assert reader.may_run(REQUESTS[4]) == LOADING
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
    reader.in_flight.update(dict.fromkeys((5, 6), 1))
    for adapter_id in (4, 5, 6):
        reader.begin_ahead(adapter_id)

    said = [reader.may_run(request) for request in REQUESTS[1:4]]
    reader.settle(6.0)

    assert said == [LOADING] * 3 and reader.worker.done == {1, 2, 3, 4, 5, 6}
