"""What must hold of an engine between any two calls, whatever happened before."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

import torch

from minivllm import LLMEngine


def check_engine(engine: LLMEngine, live: Iterable[str]) -> None:
    """Nothing lost, nothing leaked. live: ids of the requests that were sent and have not ended"""
    _check_requests(engine, set(live))
    check_blocks(engine)
    check_slots(engine)
    _check_registry(engine)


def _check_requests(engine: LLMEngine, live: set[str]) -> None:
    scheduler = engine.scheduler
    held = chain.from_iterable(scheduler.followers.values())
    queued = [request.request_id for request in [*scheduler.waiting, *scheduler.running, *held]]
    assert len(queued) == len(set(queued)), f"in two queues: {queued}"
    assert set(queued) == set(scheduler.requests) == live, (
        set(queued) ^ live,
        set(scheduler.requests) ^ live,
    )
    assert set(engine.output_processor.states) == live
    assert set(engine.runner.row_sampler.draws) <= live
    assert len(scheduler.running) <= scheduler.scheduler_config.max_num_seqs


def check_blocks(engine: LLMEngine) -> None:
    pool = engine.scheduler.kv_cache.block_pool
    used = Counter(block for request in engine.scheduler.running for block in request.block_ids)
    assert all(not request.block_ids for request in engine.scheduler.waiting), (
        "a waiting request holds blocks"
    )
    assert pool.ref_cnt == [used[block] for block in range(pool.num_blocks)], "reference counts"
    assert set(pool.free) == set(range(1, pool.num_blocks)) - used.keys(), "free blocks"
    assert {block: pool.hash_of[block] for block in pool.block_of.values()} == pool.hash_of
    assert {pool.block_of[block_hash] for block_hash in pool.hash_of.values()} == pool.hash_of.keys()


def check_slots(engine: LLMEngine) -> None:
    manager = engine.adapters.manager
    slots = [adapter_id for adapter_id in manager.lora_index_to_id if adapter_id is not None]
    memory = manager.list_adapters()
    assert len(slots) == len(set(slots)), f"one adapter in two slots: {slots}"
    assert set(slots) <= memory.keys(), "in a slot but not in memory"
    assert len(memory) <= manager.capacity
    assert manager.pinned_adapters <= set(slots), "pinned but in no slot"
    assert len(engine.adapters.pinned) <= manager.lora_slots


def _check_registry(engine: LLMEngine) -> None:
    adapters = engine.adapters
    in_flight = {request.adapter_id for request in engine.scheduler.requests.values()} - {0}
    assert in_flight <= adapters.adapters.keys(), "a request's adapter is unknown"
    assert adapters.manager.list_adapters().keys() <= adapters.adapters.keys(), "in memory but unknown"
    assert adapters.pinned <= adapters.adapters.keys(), "pinned but unknown"
    leaving = {adapter.id for adapter in adapters.adapters.values() if adapter.leaving}
    assert leaving <= in_flight, "an unload was forgotten"
    noted = {a.id for a in adapters.adapters.values() if a.reloads or a.failures or a.leaving}
    assert noted <= adapters.noted, "what was noted of an adapter will not be looked at"
    named = {name: adapter.id for adapter in adapters.adapters.values() for name in adapter.names}
    assert adapters.by_name == named, "a name leads elsewhere"
    for adapter_id in in_flight:
        generations = {
            r.adapter_generation for r in engine.scheduler.requests.values() if r.adapter_id == adapter_id
        }
        assert engine.scheduler.in_flight[adapter_id].keys() == generations
    for adapter in adapters.adapters.values():
        for generation in adapter.reloads:
            assert adapters._in_flight(adapter, before=generation + 1), "a reload that nobody waits for"
    for request in engine.scheduler.waiting:
        if request.adapter_id and request.adapter_generation in adapters.adapters[request.adapter_id].reloads:
            assert engine.scheduler.why_wait(request), "it may run before its reload"


def check_slot_contents(engine: LLMEngine) -> None:
    """Every slot holds, to the bit, what memory holds of the adapter that the table names."""
    manager = engine.adapters.manager
    for adapter_id, slot in manager.list_active_adapters().items():
        lora = manager.list_adapters()[adapter_id]
        for name, module in manager.modules.items():
            weights = lora.get_lora(name)
            for i in range(module.n_slices):
                a = b = None
                if weights is not None:
                    a, b = weights.lora_a, weights.lora_b
                    a, b = (a[i], b[i]) if isinstance(a, list) else (a, b)
                rank = 0 if a is None else len(a)
                slot_a, slot_b = module.slots.a[i][slot, 0], module.slots.b[i][slot, 0]
                assert module.slots.live_ranks[i][slot] == rank
                assert not slot_a[rank:].any() and not slot_b[:, rank:].any(), "something past the rank"
                if rank:
                    assert torch.equal(slot_a[:rank], a) and torch.equal(slot_b[:, :rank], b), (
                        adapter_id,
                        name,
                    )


def check_empty(engine: LLMEngine) -> None:
    """Once every request has ended and every adapter was removed, nothing is left of them."""
    check_engine(engine, [])
    pool = engine.scheduler.kv_cache.block_pool
    assert len(pool.free) == pool.num_usable_blocks
    assert not engine.runner.row_sampler.draws
    manager = engine.adapters.manager
    assert not engine.adapters.adapters and not manager.list_adapters() and not manager.pinned_adapters
    assert not manager.stats.by_adapter
    assert set(manager.lora_index_to_id) == {None}
