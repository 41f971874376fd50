"""A step's adapters, loaded on demand (lab 5.7), against two plain lists and the files on disk."""

import random
import shutil

import pytest

from minivllm.errors import blamed_adapter
from minivllm.lora.mapping import LoRAMapping
from tests.oracles.tiers import TwoTiers
from tests.worlds.managers import (
    Folders,
    assert_memory,
    assert_slot_holds,
    assert_slots,
    count_copies,
    count_reads,
    fail_copies,
    make_worker,
)

pytestmark = pytest.mark.lab("5.7")


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)


def assert_reads(reads, expected, why):
    __tracebackhide__ = True
    assert sorted(reads) == expected, (
        f"{why}\n  folders read, expected {expected}\n  folders read, found    {reads}"
    )


def test_a_step_reads_what_is_missing_into_a_slot(folders, monkeypatch):
    reads = count_reads(monkeypatch)
    worker = make_worker(slots=2, memory=3)

    worker.set_active_adapters(folders.requests(3, 1), LoRAMapping((3, 1, 0), (3, 1, 0)))

    assert_reads(reads, [1, 3], "a step that needs 3 and 1")
    assert_slots(worker.manager, [1, 3], "a step that needs 3 and 1 takes them in the order of their ids")
    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")
    assert_slot_holds(worker.manager, 1, folders.weights[3], "adapter 3")
    assert worker.manager.punica_wrapper.token_lora_indices.tolist() == [1, 0, -1], "slots of 3, 1 and base"


def test_a_folder_is_read_once_for_all_the_steps_that_use_it(folders, monkeypatch):
    reads = count_reads(monkeypatch)
    worker = make_worker(slots=1)
    request = folders.request(1)
    worker.set_active_adapters([request], None)
    shutil.rmtree(folders.root / "1")

    for _ in range(3):
        worker.set_active_adapters([request], None)

    assert_reads(reads, [1], "four steps that need 1")


def test_a_step_like_the_last_one_finds_who_was_thrown_out_of_memory_in_between(folders, monkeypatch):
    reads = count_reads(monkeypatch)
    worker = make_worker(slots=2)
    step = folders.requests(1), LoRAMapping((1, 0), (1, 0))
    worker.set_active_adapters(*step)
    worker.manager.set_in_use(())
    worker.manager.remove_oldest_adapter()

    worker.set_active_adapters(*step)

    assert_reads(reads, [1, 1], "a step that needs 1, before and after it was thrown out")
    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")


def test_requests_come_as_a_list_or_a_set_repeated_or_none(folders):
    for requests in (folders.requests(1, 2, 1), set(folders.requests(1, 2)), [*folders.requests(1, 2), None]):
        worker = make_worker(slots=2)

        worker.set_active_adapters(requests, LoRAMapping([], []))

        assert_slots(
            worker.manager,
            [1, 2],
            f"requests for 1 and 2 as a {type(requests).__name__}, repeated or with a None",
        )


def test_a_step_of_base_requests_needs_nothing(folders):
    worker = make_worker(slots=1)
    worker.set_active_adapters(folders.requests(1), None)

    worker.set_active_adapters(set(), LoRAMapping((0, 0), (0,)))

    assert_slots(worker.manager, [1], "a step without adapters moves none")
    assert worker.manager.punica_wrapper.token_lora_indices.tolist() == [-1, -1], "two base rows"


def test_slots_are_settled_before_ids_are_translated(folders):
    worker = make_worker(slots=1, memory=2)
    worker.set_active_adapters(folders.requests(1), LoRAMapping((1,), (1,)))

    worker.set_active_adapters(folders.requests(2), LoRAMapping((2,), (2,)))

    assert worker.manager.punica_wrapper.token_lora_indices.tolist() == [0], "2 has the only slot now"
    assert_slot_holds(worker.manager, 0, folders.weights[2], "adapter 2")


@pytest.mark.parametrize("oldest", [1, 7])
@pytest.mark.parametrize("memory", [3, 6])
def test_what_the_step_needs_is_not_evicted_for_what_else_it_needs(folders, monkeypatch, oldest, memory):
    """Incident 6: slots [1, 2, 3] and a step that wants 4, 1 and 5 cost two copies, not three.

    Whatever order the ids of a step are taken in, there is an oldest adapter that comes late in it.
    """
    worker = make_worker(slots=3, memory=memory)
    for adapter_id in (oldest, 2, 3):
        worker.set_active_adapters(folders.requests(adapter_id), None)
    copies, reads = count_copies(monkeypatch, worker.manager), count_reads(monkeypatch)

    worker.set_active_adapters(folders.requests(4, oldest, 5), None)

    why = f"slots were {[oldest, 2, 3]}, {oldest} used longest ago; the step needs 4, {oldest} and 5"
    assert_slots(worker.manager, [oldest, 4, 5], why)
    assert_reads(reads, [4, 5], why)
    assert copies == [1, 2], f"{why}: copies into slots 1 and 2, not {copies}"


def test_more_adapters_than_slots_are_refused_before_anything_changes(folders, monkeypatch):
    worker = make_worker(slots=2, memory=4)
    worker.set_active_adapters(folders.requests(1, 2), None)
    reads = count_reads(monkeypatch)

    for attempt in (worker.prepare_adapters, lambda requests: worker.set_active_adapters(requests, None)):
        with pytest.raises(RuntimeError, match=r"requested LoRAs \(3\) is greater than .* slots \(2\)"):
            attempt(folders.requests(3, 4, 5))

    assert_reads(reads, [], "a step with three adapters for two slots is refused")
    assert_slots(worker.manager, [1, 2], "a step with three adapters for two slots is refused")
    assert worker.manager.in_use == {1, 2}, "a step that is refused leaves `in_use` as it was"


def test_slots_that_are_pinned_by_others_are_not_there(folders, monkeypatch):
    """Incident 3, where it hit: with one of two slots pinned, the batch {2, 3} cannot be placed."""
    worker = make_worker(slots=2, memory=4)
    worker.add_adapter(folders.request(1))
    worker.pin_adapter(1)
    reads = count_reads(monkeypatch)

    with pytest.raises(RuntimeError, match=r"\(2 plus 1 pinned\)"):
        worker.set_active_adapters(folders.requests(2, 3), None)

    assert_reads(reads, [], "1 is pinned, so 2 and 3 cannot both have a slot")
    assert_slots(worker.manager, [1, None], "1 is pinned, so 2 and 3 cannot both have a slot")


def test_a_bad_adapter_evicts_nobody(folders):
    """Incident 14."""
    worker = make_worker(slots=2, memory=2)
    worker.set_active_adapters(folders.requests(1, 2), None)
    folders.damage(3)

    with pytest.raises(ValueError, match="adapter 'adapter-3'"):
        worker.set_active_adapters(folders.requests(3), None)

    assert_memory(worker.manager, [1, 2], "3 cannot be read, so nobody makes room for it")
    assert_slots(worker.manager, [1, 2], "3 cannot be read, so nobody makes room for it")


def test_preparing_tells_who_failed_and_loads_the_others(folders):
    worker = make_worker(slots=4, memory=4)
    folders.damage(2)
    requests = folders.requests(1, 2, 3, 4)
    shutil.rmtree(folders.root / "3")

    failures = worker.prepare_adapters(requests)

    kinds = {adapter_id: type(error) for adapter_id, error in failures.items()}
    expected = {2: ValueError, 3: FileNotFoundError}
    assert kinds == expected, (
        f"2 is damaged, 3 gone, 1 and 4 are well\n  expected {expected}\n  found    {kinds}"
    )
    assert "adapter-2" in str(failures[2])
    assert_memory(worker.manager, [1, 4], "2 is damaged, 3 gone, 1 and 4 are well")
    assert_slots(worker.manager, [None] * 4, "preparing brings adapters into memory, not into slots")
    assert worker.manager.in_use == {1, 2, 3, 4}, (
        "the step's adapters are in use, those that failed among them"
    )


class PanicException(BaseException):
    """What a panic in a Rust library is, by its name."""


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OverflowError("too large"), KeyError("weight"), PanicException("out of range")],
    ids=repr,
)
def test_preparing_keeps_whatever_one_adapter_raises_to_that_adapter(folders, monkeypatch, error):
    worker = make_worker(slots=4, memory=4)
    fail_load(monkeypatch, worker, 2, error)

    failures = worker.prepare_adapters(folders.requests(1, 2, 3))

    assert failures == {2: error}
    assert_memory(worker.manager, [1, 3], "2 raised something; 1 and 3 are well")


def test_preparing_lets_ctrl_c_through(folders, monkeypatch):
    worker = make_worker(slots=4, memory=4)
    fail_load(monkeypatch, worker, 2, KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        worker.prepare_adapters(folders.requests(1, 2, 3))


def fail_load(monkeypatch, worker, adapter_id, error):
    """Have one adapter's loading raise something that no folder is to blame for."""
    load = worker.source.load

    def loaded(lora_request, **kwargs):
        if lora_request.lora_int_id == adapter_id:
            raise error
        return load(lora_request, **kwargs)

    monkeypatch.setattr(worker.source, "load", loaded)


def test_preparing_evicts_from_memory_nothing_that_the_step_needs(folders, monkeypatch):
    worker = make_worker(slots=2, memory=2)
    worker.set_active_adapters(folders.requests(5, 6), None)
    reads = count_reads(monkeypatch)

    failures = worker.prepare_adapters(folders.requests(5, 1))
    worker.set_active_adapters(folders.requests(5, 1), None)

    assert failures == {}, f"1 and 5 can both be in memory; failed: {list(failures)}"
    assert_reads(reads, [1], "5 and 6 were in memory, the step needs 5 and 1")
    assert_memory(worker.manager, [1, 5], "5 and 6 were in memory, the step needs 5 and 1")


def test_an_adapter_out_of_memory_is_read_again_as_its_files_are_now(folders):
    worker = make_worker(slots=1, memory=1)
    worker.set_active_adapters(folders.requests(1), None)
    first = worker.manager.get_adapter(1).load_id
    worker.set_active_adapters(folders.requests(2), None)
    folders.write(1, seed=100)

    worker.set_active_adapters(folders.requests(1), None)

    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1 as its files are now")
    assert worker.manager.get_adapter(1).load_id != first, "1 was read again: another load, another identity"
    assert worker.manager.stats.adapter(1).loads == 2


def test_a_request_to_load_in_place_does_not_read_at_every_step(folders, monkeypatch):
    """Incident 15: the flag belongs to the moment of asking; the steps see the same request again and again."""
    worker = make_worker(slots=1)
    request, reads = folders.request(1, load_inplace=True), count_reads(monkeypatch)

    for _ in range(4):
        worker.prepare_adapters({request})
        worker.set_active_adapters({request}, LoRAMapping((1,), (1,)))

    assert_reads(reads, [1], "four steps that need 1, each with the same request, load_inplace set")
    assert worker.manager.stats.activations == 1, "four steps that need 1: one copy"


def test_a_copy_that_fails_in_a_step_is_made_up_for_in_the_next(folders, monkeypatch):
    worker = make_worker(slots=1, memory=2)
    worker.set_active_adapters(folders.requests(1), None)
    folders.request(3)
    with monkeypatch.context() as broken:
        fail_copies(broken, worker.manager, next(iter(modules_of(folders.weights[3]))))
        with pytest.raises(OSError, match="device lost"):
            worker.set_active_adapters(folders.requests(3), LoRAMapping((3,), (3,)))
        assert_slots(worker.manager, [None], "1 made room for 3, whose copy failed")

    worker.set_active_adapters(folders.requests(3), LoRAMapping((3,), (3,)))

    assert_slot_holds(worker.manager, 0, folders.weights[3], "adapter 3")


@pytest.mark.parametrize("where", ["its folder", "the copy into its slot"])
def test_what_an_adapter_raises_in_a_step_is_put_down_to_it(folders, monkeypatch, where):
    worker = make_worker(slots=2, memory=2)
    worker.set_active_adapters(folders.requests(1), None)
    requests = folders.requests(1, 3)
    if where == "its folder":
        fail_load(monkeypatch, worker, 3, OSError("device lost"))
    else:
        fail_copies(monkeypatch, worker.manager, next(iter(modules_of(folders.weights[3]))))

    with pytest.raises(OSError, match="device lost") as raised:
        worker.set_active_adapters(requests, None)

    assert blamed_adapter(raised.value) == 3, f"{where} failed in a step that needs 1 and 3"


def test_a_step_like_the_last_one_brings_back_what_a_failed_copy_has_thrown_out(folders, monkeypatch):
    worker = make_worker(slots=1, memory=2)
    worker.add_adapter(folders.request(3))
    requests, mapping = [*folders.requests(1, 1), None], LoRAMapping((1,), (1,))
    for _ in range(2):
        worker.set_active_adapters(requests, mapping)
    worker.manager.set_in_use(())
    with monkeypatch.context() as broken:
        fail_copies(broken, worker.manager, next(iter(modules_of(folders.weights[3]))))
        with pytest.raises(OSError, match="device lost"):
            worker.pin_adapter(3)
        assert_slots(worker.manager, [None], "1 made room for 3, whose copy failed")

    worker.set_active_adapters(requests, mapping)

    assert_slot_holds(worker.manager, 0, folders.weights[1], "adapter 1")


def modules_of(weights):
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    for name in weights.pairs:
        prefix, _, suffix = name.rpartition(".")
        yield f"{prefix}.{fused.get(suffix, suffix)}"


def test_hits_and_misses_are_counted_by_step_and_adapter(folders):
    worker = make_worker(slots=2, memory=3)

    for wanted in ([1, 2], [1, 2], [1, 3], [2], []):
        worker.set_active_adapters(folders.requests(*wanted), None)

    stats = worker.manager.stats
    told = "1, 2 miss, then hit; 1 hits and 3 misses; 2 misses: hits, misses"
    assert (stats.hits, stats.misses) == (3, 4), f"{told} should be (3, 4)"
    steps = {adapter_id: history.steps for adapter_id, history in stats.by_adapter.items()}
    assert steps == {1: 3, 2: 3, 3: 1}, "steps by adapter"


@pytest.mark.parametrize(("slots", "memory"), [(1, 1), (2, 4), (3, 5)])
def test_any_history_of_steps_pins_and_changing_files_does_what_two_lists_do(
    folders, monkeypatch, slots, memory
):
    for seed in range(2):
        rng = random.Random(seed)
        worker, model = make_worker(slots, memory), TwoTiers(slots, memory)
        manager, reads, loads = worker.manager, count_reads(monkeypatch), []

        def read(adapter_id, loads=loads):
            loads.append(adapter_id)
            return folders.weights[adapter_id]

        for _ in range(40):
            change_pins(rng, worker, model)
            if rng.random() < 0.2:
                folders.write(rng.randrange(1, 8), seed=rng.randrange(10**6))
            wanted = rng.sample(range(1, 8), rng.randint(0, slots + (rng.random() < 0.1)))
            requests = folders.requests(*wanted)
            told = (
                f"a step that needs {wanted}, with {memory} places in memory, where before it\n"
                f"  slots {model.slots}, pinned {sorted(model.pins)}, "
                f"in memory, oldest first, {model.by_use(model.memory)}"
            )

            found, expected = (
                outcome(worker.set_active_adapters, requests, None),
                outcome(model.serve, wanted, read),
            )

            for what, ours, theirs in (
                ("outcome", found, expected),
                ("slots", manager.lora_index_to_id, model.slots),
                ("in memory, oldest first", list(manager.list_adapters()), model.by_use(model.memory)),
                ("folders read so far", reads, loads),
            ):
                assert ours == theirs, f"{told}\n{what}: expected {theirs}\n  found {ours}"
            for slot, adapter_id in enumerate(model.slots):
                if adapter_id is not None:
                    whose = f"adapter {adapter_id} after {told}"
                    assert_slot_holds(manager, slot, model.memory[adapter_id], whose)


def change_pins(rng, worker, model):
    if model.pins and rng.random() < 0.4:
        adapter_id = rng.choice(sorted(model.pins))
        assert worker.manager.unpin_adapter(adapter_id) == model.unpin(adapter_id)
    if model.memory and rng.random() < 0.3:
        adapter_id = rng.choice(sorted(model.memory))
        assert outcome(worker.pin_adapter, adapter_id) == outcome(model.pin, adapter_id)


def outcome(call, *args):
    try:
        return call(*args)
    except RuntimeError:
        return RuntimeError
