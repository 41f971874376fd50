"""Loading because somebody asks for it, and asking again (lab 5.9)."""

import pytest
from small_model import Folders, count_reads, fail_copies, make_worker, slot_holds

pytestmark = pytest.mark.lab("5.9")


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)


def test_an_added_adapter_is_in_memory_and_in_a_slot(folders):
    worker = make_worker(slots=2)

    assert worker.add_adapter(folders.request(1))

    assert worker.list_adapters() == {1}
    assert slot_holds(worker.manager, 0, folders.weights[1])


def test_adding_what_is_there_reads_nothing_but_counts_as_use(folders, monkeypatch):
    worker = make_worker(slots=2, memory=2)
    for adapter_id in (1, 2):
        worker.add_adapter(folders.request(adapter_id))
    reads = count_reads(monkeypatch)

    assert not worker.add_adapter(folders.request(1))

    assert reads == []
    worker.add_adapter(folders.request(3))
    assert worker.list_adapters() == {1, 3}


def test_adding_what_is_in_memory_counts_as_use_though_no_slot_can_be_had(folders):
    worker = make_worker(slots=1, memory=3)
    worker.set_active_adapters(folders.requests(9), None)
    for adapter_id in (1, 2):
        worker.add_adapter(folders.request(adapter_id))

    worker.add_adapter(folders.request(1))

    worker.add_adapter(folders.request(3))
    assert worker.list_adapters() == {9, 1, 3}


def test_load_inplace_reads_again_and_makes_a_new_identity(folders, monkeypatch):
    worker = make_worker(slots=2)
    worker.add_adapter(folders.request(1))
    first, reads = worker.manager.get_adapter(1).load_id, count_reads(monkeypatch)
    folders.write(1, seed=100)

    assert worker.add_adapter(folders.request(1, load_inplace=True))

    assert reads == [1]
    assert worker.manager.get_adapter(1).load_id != first
    assert worker.manager.lora_index_to_id == [1, None]
    assert slot_holds(worker.manager, 0, folders.weights[1])


def test_without_load_inplace_changed_files_are_not_looked_at(folders):
    worker = make_worker(slots=1)
    worker.add_adapter(folders.request(1))
    served = folders.weights[1]
    folders.write(1, seed=100)

    worker.add_adapter(folders.request(1))

    assert slot_holds(worker.manager, 0, served)


def test_load_inplace_of_an_unknown_adapter_reads_it_once(folders, monkeypatch):
    worker, reads = make_worker(slots=1), count_reads(monkeypatch)

    assert worker.add_adapter(folders.request(1, load_inplace=True))

    assert reads == [1]


def test_a_reload_that_cannot_be_read_leaves_the_old_weights_serving(folders):
    worker = make_worker(slots=1)
    worker.add_adapter(folders.request(1))
    worker.pin_adapter(1)
    served, load_id = folders.weights[1], worker.manager.get_adapter(1).load_id
    folders.damage(1)

    with pytest.raises(ValueError, match="adapter 'adapter-1'"):
        worker.add_adapter(folders.request(1, load_inplace=True))

    assert worker.manager.get_adapter(1).load_id == load_id
    assert worker.manager.pinned_adapters == {1}
    assert slot_holds(worker.manager, 0, served)


def test_a_reload_keeps_the_pin(folders):
    worker = make_worker(slots=1, memory=2)
    worker.add_adapter(folders.request(1))
    worker.pin_adapter(1)
    folders.write(1, seed=100)

    worker.add_adapter(folders.request(1, load_inplace=True))

    assert worker.manager.pinned_adapters == {1}
    assert slot_holds(worker.manager, 0, folders.weights[1])


def test_a_bad_adapter_evicts_nobody(folders):
    """Incident 14."""
    worker = make_worker(slots=1, memory=1)
    worker.add_adapter(folders.request(1))
    folders.damage(2)

    with pytest.raises(ValueError, match="adapter 'adapter-2'"):
        worker.add_adapter(folders.request(2))

    assert worker.list_adapters() == {1}
    assert worker.manager.lora_index_to_id == [1]


def test_a_running_adapter_keeps_its_slot_and_the_new_one_waits_in_memory(folders):
    worker = make_worker(slots=1, memory=2)
    worker.set_active_adapters(folders.requests(1), None)

    assert worker.add_adapter(folders.request(2))

    assert worker.manager.lora_index_to_id == [1]
    assert worker.list_adapters() == {1, 2}


def test_memory_full_of_running_adapters_takes_no_other(folders):
    worker = make_worker(slots=1, memory=1)
    worker.set_active_adapters(folders.requests(1), None)

    with pytest.raises(RuntimeError, match="pinned or in use"):
        worker.add_adapter(folders.request(2))

    assert worker.list_adapters() == {1}


def test_adding_evicts_the_oldest_adapter_that_does_not_run(folders):
    worker = make_worker(slots=2, memory=3)
    worker.set_active_adapters(folders.requests(1, 2), None)
    worker.set_active_adapters(folders.requests(2), None)

    worker.add_adapter(folders.request(3))

    assert worker.manager.lora_index_to_id == [3, 2]
    assert worker.list_adapters() == {1, 2, 3}


def test_a_copy_that_fails_keeps_the_adapter_in_memory_for_the_next_step(folders, monkeypatch):
    worker = make_worker(slots=1)
    folders.write(1, seed=1)
    with monkeypatch.context() as broken:
        fail_copies(broken, worker.manager)
        with pytest.raises(OSError, match="device lost"):
            worker.add_adapter(folders.request(1))

    assert worker.manager.lora_index_to_id == [None]
    worker.set_active_adapters(folders.requests(1), None)
    assert slot_holds(worker.manager, 0, folders.weights[1])
