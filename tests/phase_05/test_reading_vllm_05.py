"""What phases/05 asks about vLLM's two tiers, answered by scenarios here."""

import pytest

from minivllm.vllm.layers import LoRAMapping
from tests.worlds.managers import (
    Folders,
    assert_memory,
    assert_slots,
    make_adapter,
    make_manager,
    make_worker,
)


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)


def test_who_is_dropped_from_memory_is_taken_out_of_its_slot_once():
    manager = make_manager(slots=2, memory=2)
    heard = []
    manager.listeners.append(lambda event: heard.append((event.kind, event.adapter_id)))
    for adapter_id in (1, 2):
        manager.add_adapter(make_adapter(adapter_id))
        manager.activate_adapter(adapter_id)
    heard.clear()

    manager.add_adapter(make_adapter(3))

    assert_slots(manager, [None, 2], "1 was used longest ago")
    assert [event for event in heard if event[1] == 1] == [("evict", 1), ("drop", 1)]


def test_a_step_that_wants_the_oldest_and_a_new_one_reads_once(folders):
    worker = make_worker(slots=2, memory=2)
    manager = worker._adapter_manager
    worker.set_active_adapters(folders.requests(1, 2), LoRAMapping((1, 2), (1, 2)))
    reads = []
    manager.listeners.append(lambda event: reads.append(event.adapter_id) if event.kind == "load" else None)

    worker.set_active_adapters(folders.requests(3, 1), LoRAMapping((3, 1), (3, 1)))

    assert reads == [3]
    assert_memory(manager, [1, 3], "1 is wanted, so 2 made room")
    assert_slots(manager, [1, 3], "1 stayed where it was")
