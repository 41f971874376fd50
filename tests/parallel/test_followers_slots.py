"""A follower writes slots by the way that everybody has, and its table names what is there."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from minivllm.parallel.follower import Follower
from minivllm.parallel.shared_reading import Assignment


class Table(dict):
    put = dict.__setitem__


class Manager:
    """Slots that can be written, and copies that fail when they are told to. It has nothing private."""

    def __init__(self):
        self.tiers = SimpleNamespace(memory=Table(), slots=Table())
        self.written, self.error = [], None

    def write_slot(self, adapter, slot):
        if self.error:
            raise self.error
        self.written.append((adapter, slot, dict(self.tiers.slots)))

    def remove_adapter(self, adapter_id):
        self.tiers.slots.pop(adapter_id, None)


@pytest.fixture
def follower():
    made = Follower(None, None)
    made.runner = SimpleNamespace(worker_manager=SimpleNamespace(manager=Manager()))
    for number in (10, 11):
        made.adapters[number] = Future()
        made.adapters[number].set_result(f"adapter {number}")
    return made


def test_the_table_names_an_adapter_once_its_slot_is_written(follower):
    manager = follower.runner.worker_manager.manager

    follower._assign({1: Assignment(0, 10), 2: Assignment(1, 11)})

    assert manager.written == [("adapter 10", 0, {}), ("adapter 11", 1, {1: 0})]
    assert manager.tiers.slots == {1: 0, 2: 1}


def test_the_table_does_not_name_an_adapter_whose_copy_failed(follower):
    manager = follower.runner.worker_manager.manager
    manager.error = OSError("the device is lost")

    with pytest.raises(OSError, match="lost"):
        follower._assign({1: Assignment(0, 10)})

    assert manager.tiers.slots == {}


def test_what_rank_0_has_dropped_is_forgotten_once_the_slots_are_as_there(follower):
    follower._reader = SimpleNamespace(read=lambda message: message)
    follower.runner.launch_model = lambda step: None

    follower.launch("step", {1: Assignment(0, 10)}, [11], drawn=0)

    assert follower.adapters.keys() == {10}
