"""What can be asked of a manager: counters, events, bytes, one adapter's history."""

import json
import time

import pytest

from minivllm.lora.events import LoRAEvent
from minivllm.vllm.model_manager import LRUCacheLoRAModelManager
from tests.oracles.tiers import TwoTiers
from tests.worlds.managers import (
    RANK,
    SLICES,
    Folders,
    adapter_of,
    make_adapter,
    make_manager,
    make_worker,
    random_weights,
)


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path)


def bytes_of(weights):
    return sum(4 * (a.numel() + b.numel()) for a, b in weights.pairs.values())


def test_bytes_are_what_the_tensors_say():
    weights = {adapter_id: random_weights(adapter_id) for adapter_id in (1, 2, 3)}
    manager = make_manager(slots=2, memory=3)
    for adapter_id in weights:
        manager.add_adapter(adapter_of(adapter_id, weights[adapter_id]))
    manager.activate_adapter(2)

    memory = manager.get_memory_stats()

    sizes = {adapter_id: bytes_of(w) for adapter_id, w in weights.items()}
    per_slot = sum(4 * RANK * (k + n) for slices in SLICES.values() for _, k, n in slices)
    assert memory == {
        "slot_buffers": 2 * per_slot,
        "staging": 0,
        "tables": 0,
        "device_total": 2 * per_slot,
        "slot_bytes_by_adapter": {2: sizes[2]},
        "cpu_total": sum(sizes.values()),
        "cpu_bytes_by_adapter": sizes,
    }


def test_slots_of_half_the_width_take_half_the_bytes():
    full, half = make_manager(slots=1), make_manager(slots=1, lora_dtype="bfloat16")

    assert full.get_memory_stats()["slot_buffers"] == 2 * half.get_memory_stats()["slot_buffers"]


def test_an_adapter_tells_its_name_rank_bytes_slot_pin_and_history(folders, monkeypatch):
    worker = make_worker(slots=2, memory=2)
    worker.set_active_adapters(folders.requests(3), None)
    monkeypatch.setattr("minivllm.lora.events.time", lambda: 1234.5)
    worker.set_active_adapters(folders.requests(3, 4), None)
    monkeypatch.setattr("minivllm.lora.events.time", lambda: 1300.0)
    worker.pin_adapter(4)

    info = worker.manager.get_lora_info(4)

    assert info == {
        "last_used": 1234.5,
        "id": 4,
        "name": "adapter-4",
        "rank": folders.weights[4].rank,
        "bytes": bytes_of(folders.weights[4]),
        "slot": 1,
        "pinned": True,
        "loads": 1,
        "activations": 1,
        "steps": 1,
    }
    assert worker.manager.get_lora_info(3)["steps"] == 2
    assert worker.manager.get_lora_info(3)["pinned"] is False


def test_an_adapter_that_was_never_in_a_slot_tells_so_and_an_unknown_one_nothing():
    manager = make_manager(slots=1)
    manager.add_adapter(make_adapter(1))

    info = manager.get_lora_info(1)

    assert (info["slot"], info["activations"], info["last_used"]) == (None, 0, None)
    assert manager.stats.by_adapter == {}  # asking begins no history
    with pytest.raises(ValueError, match=r"adapter 7 is not registered; registered are \[1\]"):
        manager.get_lora_info(7)


def test_an_idle_adapters_history_is_kept(folders):
    worker = make_worker(slots=1, memory=1)
    worker.set_active_adapters(folders.requests(1), None)
    used = worker.manager.stats.adapter(1).last_used
    worker.set_active_adapters(folders.requests(2), None)
    assert worker.list_adapters() == {2}

    history = worker.manager.stats.by_adapter[1]

    assert (history.loads, history.activations, history.steps, history.last_used) == (1, 1, 1, used)


def test_events_tell_what_happened_in_order_and_once(folders):
    worker = make_worker(slots=1, memory=2)
    for wanted in (1, 2, 3):
        worker.set_active_adapters(folders.requests(wanted), None)

    events = worker.manager.stats.drain_events()

    assert events == [
        LoRAEvent("load", 1),
        LoRAEvent("activate", 1, 0),
        LoRAEvent("load", 2),
        LoRAEvent("evict", 1, 0),
        LoRAEvent("activate", 2, 0),
        LoRAEvent("load", 3),
        LoRAEvent("drop", 1),
        LoRAEvent("evict", 2, 0),
        LoRAEvent("activate", 3, 0),
    ]
    assert worker.manager.stats.drain_events() == []


def test_of_events_that_nobody_asks_for_the_last_are_kept(folders, monkeypatch):
    monkeypatch.setattr("minivllm.lora.events.MOST_EVENTS", 2)
    worker = make_worker(slots=1, memory=2)
    for wanted in (1, 2):
        worker.set_active_adapters(folders.requests(wanted), None)

    events = worker.manager.stats.drain_events()

    assert events == [LoRAEvent("evict", 1, 0), LoRAEvent("activate", 2, 0)]


def test_an_adapter_that_leaves_memory_from_its_slot_is_evicted_and_dropped(folders):
    worker = make_worker(slots=1, memory=1)
    for wanted in (1, 2):
        worker.set_active_adapters(folders.requests(wanted), None)

    kinds = [event.kind for event in worker.manager.stats.drain_events()]

    assert sorted(kinds) == ["activate", "activate", "drop", "evict", "load", "load"]
    assert (worker.manager.stats.evictions, worker.manager.stats.cpu_evictions) == (1, 1)


def test_removal_by_name_is_no_eviction(folders):
    worker = make_worker(slots=1)
    worker.set_active_adapters(folders.requests(1), None)

    worker.remove_adapter(1)

    assert (worker.manager.stats.evictions, worker.manager.stats.cpu_evictions) == (0, 0)


def test_a_load_that_failed_is_no_load(folders):
    worker = make_worker(slots=1)
    folders.damage(1)

    worker.prepare_adapters(folders.requests(1))

    assert (worker.manager.stats.loads, worker.manager.stats.load_seconds) == (0, 0.0)


def test_loads_and_activations_are_timed_by_the_clock(folders, monkeypatch):
    now = iter(range(0, 1000, 5))  # every look at the clock is five seconds after the last
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    worker = make_worker(slots=1)

    worker.set_active_adapters(folders.requests(1), None)

    stats = worker.manager.stats
    assert (stats.loads, stats.load_seconds) == (1, 5.0)
    assert (stats.activations, stats.activate_seconds) == (1, 5.0)


def test_the_hit_rate_is_hits_among_uses(folders):
    worker = make_worker(slots=2, memory=2)
    assert worker.manager.stats.hit_rate == 0.0

    for wanted in ([1], [1, 2], [1, 2], [2]):
        worker.set_active_adapters(folders.requests(*wanted), None)

    assert worker.manager.stats.hit_rate == 4 / 6


def test_the_counters_as_a_dict_are_plain_values(folders):
    worker = make_worker(slots=1, memory=1)
    for wanted in (1, 2, 2):
        worker.set_active_adapters(folders.requests(wanted), None)

    counters = worker.manager.stats.as_dict()

    assert json.loads(json.dumps(counters))["by_adapter"]["2"]["steps"] == 2
    assert "events" not in counters
    counted = {name: counters[name] for name in ("hits", "misses", "evictions", "cpu_evictions", "loads")}
    assert counted == {"hits": 1, "misses": 2, "evictions": 1, "cpu_evictions": 1, "loads": 2}
    assert counters["hit_rate"] == pytest.approx(1 / 3)


def test_room_is_promised_exactly_when_a_slot_can_be_had():
    for pins in ((), (1,), (2,), (1, 2)):
        for in_use in (set(), {1}, {2}, {1, 2}, {1, 3}):
            for active in ((), (1,), (1, 2)):
                manager, model = make_manager(2, 3), TwoTiers(2, 3)
                for adapter_id in (1, 2, 3):
                    manager.add_adapter(make_adapter(adapter_id))
                    model.add(adapter_id, None)
                for adapter_id in active:
                    manager.activate_adapter(adapter_id)
                    model.activate(adapter_id)
                for adapter_id in set(pins) & set(active):
                    manager.pin_adapter(adapter_id)
                    model.pin(adapter_id)
                manager.set_in_use(in_use)
                model.in_use = set(in_use)

                promised = [manager.has_room_for(adapter_id) for adapter_id in (1, 2, 3)]

                assert promised == [can_activate(model, adapter_id) for adapter_id in (1, 2, 3)], (
                    pins,
                    in_use,
                )


def can_activate(model, adapter_id):
    if adapter_id in model.slots or None in model.slots:
        return True
    return any(held not in model.pins | model.in_use for held in model.slots)


@pytest.mark.parametrize("backend", ["loops", "triton"])
def test_the_base_weight_is_not_counted_wherever_a_backend_puts_slots(backend):
    manager = make_manager(8, cls=LRUCacheLoRAModelManager, punica_backend=backend)

    per_slot = sum(RANK * (k + n) * 4 for slices in SLICES.values() for _, k, n in slices)
    counted = manager.get_memory_stats()["slot_buffers"]
    assert counted == 8 * per_slot
