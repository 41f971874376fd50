"""A step like the last one finds everything in its slot, unless anything at all has happened to adapters since."""

from types import SimpleNamespace

import pytest

from minivllm.lora.mapping import LoRAMapping
from tests.worlds.managers import (
    Folders,
    assert_slot_holds,
    count_copies,
    count_reads,
    make_adapter,
    make_worker,
    random_weights,
)

pytestmark = pytest.mark.lab("5.7")

ROWS = (2, 1, 0, 2)


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)


def step(worker, folders, rows=ROWS):
    adapters = sorted(set(rows) - {0})
    worker.set_active_adapters(folders.requests(*adapters), LoRAMapping(rows, rows))


def assert_rows_are_served(worker, weights, rows=ROWS):
    """Each row goes to a slot that holds its adapter's weights, bit for bit."""
    __tracebackhide__ = True
    slots = worker.manager.punica_wrapper.token_lora_indices.tolist()
    for adapter_id, slot in zip(rows, slots, strict=True):
        if adapter_id:
            assert_slot_holds(worker.manager, slot, weights[adapter_id], f"adapter {adapter_id}")
        else:
            assert slot == -1, f"a base row goes to slot {slot}"


def reload(worker, folders):
    folders.write(1, seed=91)
    worker.add_adapter(folders.request(1, load_inplace=True))


def change_places(worker, folders):
    for adapter_id in (1, 2):
        worker.manager.deactivate_adapter(adapter_id)
    for adapter_id in (2, 1):
        worker.manager.activate_adapter(adapter_id)


def fill_every_slot_with_others(worker, folders):
    worker.manager.set_in_use(())
    for adapter_id in (3, 4, 5):
        worker.manager.add_adapter(make_adapter(adapter_id))
        worker.manager.activate_adapter(adapter_id)


def other_weights_by_the_tables_alone(worker, folders):
    """No method of the manager takes the old weights out, so only the tables themselves can say that they changed."""
    folders.weights[2] = random_weights(92)
    worker.manager.tiers.slots.pop(2)
    worker.manager.tiers.memory.pop(2)
    worker.manager.add_adapter(make_adapter(2, seed=92))


CHANGES = {
    "an adapter is read again": reload,
    "two adapters change places": change_places,
    "an adapter is cleared from its slot": lambda worker, folders: worker.manager.deactivate_adapter(1),
    "an adapter is unloaded": lambda worker, folders: worker.remove_adapter(2),
    "others take every slot": fill_every_slot_with_others,
    "the oldest is dropped": lambda worker, folders: (
        worker.manager.set_in_use(()),
        worker.manager.remove_oldest_adapter(),
    ),
    "a pin": lambda worker, folders: worker.pin_adapter(1),
    "a pin that goes": lambda worker, folders: (
        worker.pin_adapter(1),
        worker.manager.unpin_adapter(1),
    ),
    "other weights by the tables alone": other_weights_by_the_tables_alone,
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_happens_between_two_steps_alike_the_second_finds_the_weights_of_now(folders, change):
    worker = make_worker(slots=3, memory=6)
    for _ in range(2):
        step(worker, folders)

    CHANGES[change](worker, folders)
    step(worker, folders)

    assert_rows_are_served(worker, folders.weights)
    assert worker.manager.in_use == {1, 2}


def test_of_steps_alike_the_second_tells_hits_and_does_nothing_else(folders, monkeypatch):
    worker = make_worker(slots=3)
    step(worker, folders)
    copies, reads, heard = count_copies(monkeypatch, worker.manager), count_reads(monkeypatch), []
    worker.manager.listeners.append(lambda event: heard.append((event.kind, event.adapter_id)))
    version = worker.manager.version

    for _ in range(3):
        step(worker, folders)

    assert (copies, reads, worker.manager.version) == ([], [], version)
    assert heard == [("hit", 1), ("hit", 2)] * 3


def test_a_step_like_the_last_one_counts_as_use_of_its_adapters(folders):
    worker = make_worker(slots=3, memory=3)
    worker.add_adapter(folders.request(3))
    for _ in range(2):
        step(worker, folders)
    worker.add_adapter(folders.request(3))

    step(worker, folders)

    assert list(worker.manager.list_adapters()) == [3, 1, 2], "3 was used before 1 and 2 were"


@pytest.mark.parametrize(("before", "rows"), [(ROWS, (1, 2)), ((0,), (0, 0))], ids=["adapters", "base alone"])
def test_a_mapping_that_could_not_be_set_is_set_by_the_next_step(folders, before, rows):
    """What follows the translation of ids to slots may raise: the step is then not one that the next can be like."""
    worker = make_worker(slots=3)
    step(worker, folders, before)
    prepared = []

    def prepare(adapters):
        prepared.append(adapters)
        if len(prepared) == 1:
            raise OSError("device lost")

    worker.manager.wrapped.following.append(SimpleNamespace(before_step=prepare))
    with pytest.raises(OSError, match="device lost"):
        step(worker, folders, rows)

    step(worker, folders, rows)

    assert len(prepared) == 2, "the step that had failed was taken for done"
    assert_rows_are_served(worker, folders.weights, rows)
