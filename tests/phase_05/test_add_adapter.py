"""Loading because somebody asks for it, and asking again (lab 5.8)."""

import pytest

from tests.worlds.managers import (
    Folders,
    assert_memory,
    assert_slot_holds,
    assert_slots,
    count_reads,
    fail_copies,
    make_worker,
    refusal,
)

pytestmark = pytest.mark.lab("5.8")


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)


def test_an_added_adapter_is_in_memory_and_in_a_slot(folders):
    worker = make_worker(slots=2)

    assert worker.add_adapter(folders.request(1)) is True, "1 was read: True"

    assert_memory(worker.manager, [1], "1 was added")
    assert_slots(worker.manager, [1, None], "1 was added, and slots were free")
    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")


def test_adding_what_is_there_reads_nothing_but_counts_as_use(folders, monkeypatch):
    worker = make_worker(slots=2, memory=2)
    for adapter_id in (1, 2):
        worker.add_adapter(folders.request(adapter_id))
    reads = count_reads(monkeypatch)

    assert worker.add_adapter(folders.request(1)) is True, "1 is in memory: True, as in vLLM"

    assert reads == [], f"1 was in memory, but its folder was read: {reads}"
    worker.add_adapter(folders.request(3))
    assert_memory(worker.manager, [1, 3], "1, 2, 1 were asked for: 2 makes room for 3")


def test_adding_what_is_in_memory_alone_brings_it_into_a_slot(folders):
    worker = make_worker(slots=1, memory=2)
    for adapter_id in (1, 2):
        worker.add_adapter(folders.request(adapter_id))

    assert worker.add_adapter(folders.request(1)) is True, "1 is in memory: True, as in vLLM"

    assert_slots(worker.manager, [1], "1 was asked for again, and nothing keeps 2 in the slot")


def test_adding_what_is_in_memory_counts_as_use_though_no_slot_can_be_had(folders):
    worker = make_worker(slots=1, memory=3)
    worker.set_active_adapters(folders.requests(9), None)
    for adapter_id in (1, 2):
        worker.add_adapter(folders.request(adapter_id))

    worker.add_adapter(folders.request(1))

    worker.add_adapter(folders.request(3))
    assert_memory(worker.manager, [1, 3, 9], "9 runs; 1, 2, 1 were asked for: 2 makes room for 3")


def test_load_inplace_reads_again_makes_a_new_identity_and_keeps_the_pin(folders, monkeypatch):
    worker = make_worker(slots=2)
    worker.add_adapter(folders.request(1))
    worker.pin_adapter(1)
    first, reads = worker.manager.get_adapter(1).load_id, count_reads(monkeypatch)
    folders.write(1, seed=100)

    assert worker.add_adapter(folders.request(1, load_inplace=True)) is True, "1 was read again: True"

    assert reads == [1], f"load_inplace reads the folder once, not {len(reads)} times"
    assert worker.manager.stats.loads == 2, "1 was read, then read again: two loads to be counted"
    assert worker.manager.get_adapter(1).load_id != first, "1 was read again: another load, another identity"
    assert worker.manager.pinned_adapters == {1}, "1 was pinned when it was read again"
    assert_slots(worker.manager, [1, None], "1 was in slot 0 when it was read again")
    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1 as its files are now")


def test_without_load_inplace_changed_files_are_not_looked_at(folders):
    worker = make_worker(slots=1)
    worker.add_adapter(folders.request(1))
    served = folders.weights[1]
    folders.write(1, seed=100)

    worker.add_adapter(folders.request(1))

    assert_slot_holds(worker.manager, 0, served, "adapter 1 as it was read at first")


def test_load_inplace_of_an_unknown_adapter_reads_it_once(folders, monkeypatch):
    worker, reads = make_worker(slots=1), count_reads(monkeypatch)

    assert worker.add_adapter(folders.request(1, load_inplace=True)) is True, "1 was read: True"

    assert reads == [1], f"1 was unknown: its folder is read once, not {len(reads)} times"
    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")


def test_a_reload_that_cannot_be_read_leaves_the_old_weights_serving(folders):
    worker = make_worker(slots=1)
    worker.add_adapter(folders.request(1))
    worker.pin_adapter(1)
    served, load_id = folders.weights[1], worker.manager.get_adapter(1).load_id
    folders.damage(1)

    with pytest.raises(ValueError, match="adapter 'adapter-1'"):
        worker.add_adapter(folders.request(1, load_inplace=True))

    assert_memory(worker.manager, [1], "1 could not be read again, so it stays as it is")
    assert worker.manager.get_adapter(1).load_id == load_id, (
        "1 could not be read again: the same load as before"
    )
    assert worker.manager.pinned_adapters == {1}, "1 could not be read again, so its pin holds"
    assert_slot_holds(worker.manager, 0, served, "adapter 1 as it was read at first")


def test_a_bad_adapter_evicts_nobody(folders):
    """Incident 14."""
    worker = make_worker(slots=1, memory=1)
    worker.add_adapter(folders.request(1))
    folders.damage(2)

    with pytest.raises(ValueError, match="adapter 'adapter-2'"):
        worker.add_adapter(folders.request(2))

    assert_memory(worker.manager, [1], "2 cannot be read, so 1 makes no room for it")
    assert_slots(worker.manager, [1], "2 cannot be read, so 1 makes no room for it")


def test_a_running_adapter_keeps_its_slot_and_the_new_one_waits_in_memory(folders):
    worker = make_worker(slots=1, memory=2)
    worker.set_active_adapters(folders.requests(1), None)

    assert worker.add_adapter(folders.request(2)) is True, "2 was read: True, though no slot can be had"

    assert_slots(worker.manager, [1], "1 runs, so 2 gets no slot")
    assert_memory(worker.manager, [1, 2], "2 waits in memory")


def test_memory_full_of_running_adapters_takes_no_other(folders):
    worker = make_worker(slots=1, memory=1)
    worker.set_active_adapters(folders.requests(1), None)

    with refusal(RuntimeError, "1 runs and memory has one place, so 2 cannot be added"):
        worker.add_adapter(folders.request(2))

    assert_memory(worker.manager, [1], "1 runs, and memory has one place")


def test_adding_evicts_the_oldest_adapter_that_does_not_run(folders):
    worker = make_worker(slots=2, memory=3)
    worker.set_active_adapters(folders.requests(1, 2), None)
    worker.set_active_adapters(folders.requests(2), None)

    worker.add_adapter(folders.request(3))

    assert_slots(worker.manager, [3, 2], "2 runs, 1 does not any more: 1 makes room for 3")
    assert_memory(worker.manager, [1, 2, 3], "memory has room for three")


def test_a_copy_that_fails_is_not_a_slot_that_cannot_be_had(folders, monkeypatch):
    """PyTorch raises RuntimeError when a GPU fails; "no slot can be had" is a RuntimeError, too, and no failure."""
    worker = make_worker(slots=1)
    fail_copies(monkeypatch, worker.manager, error=RuntimeError)

    with pytest.raises(RuntimeError, match="device lost"):
        worker.add_adapter(folders.request(1))

    assert_slots(worker.manager, [None], "the copy of 1 failed")


def test_a_copy_that_fails_keeps_the_adapter_in_memory_for_the_next_step(folders, monkeypatch):
    worker = make_worker(slots=1)
    folders.write(1, seed=1)
    with monkeypatch.context() as broken:
        fail_copies(broken, worker.manager)
        with pytest.raises(OSError, match="device lost"):
            worker.add_adapter(folders.request(1))

    assert_slots(worker.manager, [None], "the copy of 1 failed")
    assert_memory(worker.manager, [1], "the copy of 1 failed, but it was read")
    worker.set_active_adapters(folders.requests(1), None)
    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")


def test_a_reload_whose_copy_fails_leaves_the_old_weights_to_be_served(folders, monkeypatch):
    """A caller who was told that the reload failed asks for the adapter again, and expects what it was before."""
    worker = make_worker(slots=1, memory=2)
    for adapter_id in (1, 2):
        worker.add_adapter(folders.request(adapter_id))
    served = folders.weights[1]
    folders.write(1, seed=100)
    with monkeypatch.context() as broken:
        fail_copies(broken, worker.manager)
        with pytest.raises(OSError, match="device lost"):
            worker.add_adapter(folders.request(1, load_inplace=True))

    worker.add_adapter(folders.request(1))
    assert_slot_holds(worker.manager, 0, served, "adapter 1 as it was before the reload that failed")
