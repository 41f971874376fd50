"""The worker manager that keeps only what the step needs, dummy adapters, and removal."""

import pytest

from minivllm.lora.mapping import LoRAMapping
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from tests.worlds.managers import RANK, SLICES, Folders, assert_slot_holds, count_reads, make_worker


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)


def test_every_step_keeps_its_own_adapters_only(folders, monkeypatch):
    reads = count_reads(monkeypatch)
    worker = make_worker(slots=2, cls=WorkerLoRAManager)

    for wanted in ([1, 2], [2, 3], [], [1]):
        worker.set_active_adapters(folders.requests(*wanted), LoRAMapping(wanted, wanted))

        assert worker.list_adapters() == set(wanted)
        active = worker.manager.list_active_adapters()
        assert active.keys() == set(wanted)
        for adapter_id, slot in active.items():
            assert_slot_holds(worker.manager, slot, folders.weights[adapter_id], f"adapter {adapter_id}")

    assert reads == [1, 2, 3, 1]


def test_a_bad_adapter_costs_no_good_one_its_place(folders):
    """Incident 14: load first, forget second."""
    worker = make_worker(slots=2, cls=WorkerLoRAManager)
    worker.set_active_adapters(folders.requests(1, 2), None)
    folders.damage(3)

    with pytest.raises(ValueError, match="adapter 'adapter-3'"):
        worker.set_active_adapters(folders.requests(2, 3), None)

    assert worker.manager.lora_index_to_id == [1, 2]


def test_more_adapters_than_slots_are_refused_before_anything_changes(folders):
    worker = make_worker(slots=1, memory=3, cls=WorkerLoRAManager)
    worker.set_active_adapters(folders.requests(1), None)

    with pytest.raises(RuntimeError, match="greater than"):
        worker.set_active_adapters(folders.requests(2, 3), None)

    assert worker.list_adapters() == {1}


def test_adding_loads_once(folders, monkeypatch):
    reads = count_reads(monkeypatch)
    worker = make_worker(slots=2, cls=WorkerLoRAManager)

    assert worker.add_adapter(folders.request(1))
    assert not worker.add_adapter(folders.request(1))

    assert reads == [1]
    assert worker.manager.lora_index_to_id == [1, None]


def test_an_adapter_that_is_in_memory_but_in_no_slot_is_given_one(folders):
    worker = make_worker(slots=1, cls=WorkerLoRAManager)
    worker.add_adapter(folders.request(1))
    worker.manager.deactivate_adapter(1)

    worker.set_active_adapters(folders.requests(1), None)

    assert worker.manager.lora_index_to_id == [1]


@pytest.mark.parametrize("cls", [WorkerLoRAManager, LRUCacheWorkerLoRAManager])
class TestBoth:
    def test_a_dummy_adapter_is_zeros_in_every_slice_at_the_rank_asked_for(self, cls):
        worker = make_worker(slots=1, cls=cls)
        request = LoRARequest("warm-up", 1, "(nowhere)")

        assert worker.add_dummy_lora(request, rank=3)
        worker.manager.activate_adapter(1)

        assert_slot_holds(worker.manager, 0, None, "nothing")
        for module, slices in SLICES.items():
            assert worker.manager.modules[module].slots.live_ranks == [[3]] * len(slices)
        assert worker.manager.get_lora_info(1)["name"] == "warm-up"

    def test_a_dummy_does_not_take_an_id_that_is_taken(self, folders, cls):
        worker = make_worker(slots=2, cls=cls)
        worker.add_adapter(folders.request(1))

        assert not worker.add_dummy_lora(folders.request(1), rank=2)

        assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")

    def test_a_dummy_of_too_large_a_rank_is_refused(self, cls):
        worker = make_worker(slots=1, cls=cls)

        with pytest.raises(ValueError, match="max_lora_rank"):
            worker.add_dummy_lora(LoRARequest("warm-up", 1, "(nowhere)"), rank=RANK + 1)

        assert worker.list_adapters() == set()

    def test_removing_empties_both_tiers(self, folders, cls):
        worker = make_worker(slots=2, cls=cls)
        worker.set_active_adapters(folders.requests(1, 2), None)

        assert worker.remove_adapter(1)
        assert not worker.remove_adapter(1)
        assert worker.list_adapters() == {2}
        assert worker.manager.lora_index_to_id == [None, 2]

        worker.remove_all_adapters()
        assert worker.list_adapters() == set()
        assert worker.manager.lora_index_to_id == [None, None]

    def test_a_removed_adapter_comes_back_as_its_files_are_now(self, folders, cls):
        worker = make_worker(slots=1, cls=cls)
        worker.add_adapter(folders.request(1))
        worker.remove_adapter(1)
        folders.write(1, seed=100)

        worker.add_adapter(folders.request(1))

        assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")
