"""Adapters in pages: slots without number, memory shared with the KV cache. On a CPU through Triton's interpreter."""

import random

import pytest

from minivllm.economics import slot_memory
from tests.tools.device import DEVICE
from tests.worlds.adapters import save_adapter
from tests.worlds.engines import TinyWorld, greedy, run, tokens_of
from tests.worlds.experts import MIXTRAL, sparse_world
from tests.worlds.models import token_ids

SEED = 5
REQUESTS = 60 if DEVICE == "cpu" else 500  # of the soak
RANKS = (1, 16, 4, 9, 8, 12, 2, 16)


class CrowdedWorld(TinyWorld):
    """Twelve adapters: the four of every tiny world, and eight of ranks 1 to 16 on all linears."""

    def __init__(self, folder):
        is_new = not folder.exists()
        super().__init__(folder, "llama-llama3-rope")
        more = [f"rank-{rank}-{i}" for i, rank in enumerate(RANKS)]
        for seed, (name, rank) in enumerate(zip(more, RANKS), 50):
            if is_new:
                save_adapter(
                    self.path(name), self.base, seed, r=rank, lora_alpha=rank, target_modules="all-linear"
                )
        self.names = [*self.names, *more]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return CrowdedWorld(tmp_path_factory.mktemp("crowded") / "world")


def elastic_engine(world, **options):
    """Float32, whose tokens can be held against float64's; no bound on adapters but memory."""
    options = {"max_loras": None, "punica_backend": "paged", "max_cpu_loras": 12, **options}
    return world.engine(**{"dtype": "float32", "max_num_seqs": 6, "device": DEVICE, **options})


def budget(engine, pages, blocks):
    """Bytes that hold so many pages of adapters and so many KV blocks beside."""
    return (pages * engine.runner.memory_plan.blocks_a_page + blocks) * engine.runner.kv_block_bytes


def small_memory(world, pages, blocks):
    roomy = elastic_engine(world)
    return {"kv_cache_memory_bytes": budget(roomy, pages, blocks), "num_kv_blocks": None}


def add(engine, world, requests):
    """requests: (id, adapter or None, prompt tokens, answer tokens)"""
    for request_id, name, prompt, answer in requests:
        ids = token_ids(prompt, prompt)
        engine.add_request(request_id, ids, greedy(answer), lora_request=world.request(name))


def assert_right(world, outputs, requests):
    for request_id, name, prompt, answer in requests:
        expected = world.oracle().greedy(name, token_ids(prompt, prompt), answer)
        assert tokens_of(outputs[request_id]) == expected, f"{request_id}: {name}"


def assert_books_agree(engine):
    """Every page is one slot's, kept for one adapter, or nobody's; KV blocks agree."""
    manager, pool = engine.runner.lora_manager.manager, engine.scheduler.kv_cache.block_pool
    ledger = manager.pool.ledger
    dealt = [*ledger.held.values(), *ledger.reserved.values(), ledger._unlent]
    assert sorted(page for pages in dealt for page in pages) == list(range(ledger.count))
    lent = {block for pages in dealt[:-1] for page in pages for block in pool.blocks_of(page)}
    assert len(lent) == pool.num_lent
    assert not lent & set(pool.free) and not any(pool.ref_cnt[block] for block in lent)
    for adapter_id, slot in manager.list_active_adapters().items():
        assert len(ledger.held[slot]) == manager.pages_for(adapter_id)


@pytest.mark.nightly_without_gpu
def test_all_adapters_of_a_batch_have_slots_at_once(world):
    engine = elastic_engine(world, max_num_seqs=12)
    requests = [(name, name, 5 + i, 4) for i, name in enumerate(world.names)]

    add(engine, world, requests)
    outputs = run(engine)

    assert_right(world, outputs, requests)
    assert engine.get_metrics()["lora"]["evictions"] == 0
    assert len(engine.runner.lora_manager.manager.list_active_adapters()) == 12


def test_an_adapter_takes_pages_for_its_own_rank(world):
    engine = elastic_engine(world)

    add(engine, world, [("a", "rank-1-0", 4, 2), ("b", "rank-16-1", 4, 2), ("c", "rank-9-3", 4, 2)])
    run(engine)

    manager = engine.runner.lora_manager.manager
    assert sorted(len(pages) for pages in manager.pool.ledger.held.values()) == [1, 2, 2]
    page_bytes = engine.runner.memory_plan.blocks_a_page * engine.runner.kv_block_bytes
    assert manager.get_memory_stats()["pages"] == 5 * page_bytes
    assert engine.remove_lora(world.request("rank-16-1").lora_int_id)
    assert manager.get_memory_stats()["pages"] == 3 * page_bytes


@pytest.mark.nightly_without_gpu
def test_a_given_number_of_slots_is_so_many_rows_of_the_table_with_pages_for_all(world):
    engine = elastic_engine(world, max_loras=3)
    requests = [(name, name, 4, 3) for name in world.names]

    add(engine, world, requests)
    outputs = run(engine)

    assert_right(world, outputs, requests)
    manager = engine.runner.lora_manager.manager
    pages_a_slot = -(-engine.config.lora_config.max_lora_rank // manager.pool.page_ranks)
    assert manager.pool.table.shape == (3, pages_a_slot) and len(engine.debug_info()["slots"]) == 3
    assert engine.runner.memory_plan.num_pages == 3 * pages_a_slot
    foretold = slot_memory(engine.config.model_config.architecture, engine.config.lora_config).pages
    assert foretold == 3 * pages_a_slot * manager.pool.page_elements(1) * 4
    assert_books_agree(engine)


def test_pins_leave_pages_for_an_adapter_of_the_largest_rank(world):
    """Three slots and few KV blocks are seven pages, of which each of these adapters has two."""
    engine = elastic_engine(world, max_loras=3, num_kv_blocks=20)
    ids = [world.names.index(name) + 1 for name in ("rank-16-1", "rank-16-7", "rank-9-3")]
    for adapter_id in ids:
        engine.add_lora(world.request(world.names[adapter_id - 1]))
    for adapter_id in ids[:2]:
        engine.pin_lora(adapter_id)

    with pytest.raises(RuntimeError, match="6 of 7 pages would be pinned"):
        engine.pin_lora(ids[2])

    requests = [("largest", "rank-12-5", 4, 2)]
    add(engine, world, requests)
    assert_right(world, run(engine), requests)
    assert engine.adapters.manager.pinned_adapters == set(ids[:2])


@pytest.mark.nightly_without_gpu
def test_more_adapters_than_pages_take_turns_and_all_are_right(world):
    engine = elastic_engine(world, max_lora_wait_steps=3, **small_memory(world, pages=18, blocks=60))
    requests = [(f"{name}-{i}", name, 4 + i, 5) for i in range(2) for name in world.names]

    add(engine, world, requests)
    outputs = run(engine)

    assert_right(world, outputs, requests)
    assert_books_agree(engine)


def test_keys_and_values_take_pages_back_from_idle_adapters(world):
    """Adapters first fill memory, then long requests of the base model need it."""
    engine = elastic_engine(world, enable_prefix_caching=False, **small_memory(world, pages=18, blocks=70))
    few = [(name, name, 4, 1) for name in world.names]
    add(engine, world, few)
    outputs = run(engine)
    assert_books_agree(engine)

    many = [(f"base-{i}", None, 80, 1) for i in range(6)]
    add(engine, world, many)
    evictions = engine.trace.summary()["evictions"]
    outputs |= run(engine)

    assert engine.trace.summary()["evictions"] > evictions
    assert_right(world, outputs, [*few, *many])
    assert_books_agree(engine)


@pytest.mark.nightly_without_gpu
def test_any_history_of_growth_and_shrinking_leaves_every_answer_right(world):
    """A soak: requests of all adapters and lengths come while others run, some adapters are pinned or dropped."""
    engine = elastic_engine(world, max_lora_wait_steps=4, **small_memory(world, pages=20, blocks=48))
    pick = random.Random(SEED)
    requests, outputs = [], {}
    for number in range(REQUESTS):
        name = pick.choice([None, *world.names])
        requests.append((str(number), name, pick.randint(3, 40), pick.randint(1, 12)))
        add(engine, world, requests[-1:])
        if number % 15 == 7:
            engine.add_lora(world.request("patterns"))
            engine.pin_lora(world.names.index("patterns") + 1)
        for _ in range(pick.randint(0, 3)):
            for output in engine.step():
                outputs.update({output.request_id: output} if output.finished else {})
            assert_books_agree(engine)
    outputs |= run(engine)

    assert_right(world, outputs, requests)
    assert_books_agree(engine)


@pytest.mark.nightly_without_gpu
def test_adapters_of_experts_lie_in_pages_too(tmp_path_factory):
    sparse = sparse_world(tmp_path_factory, MIXTRAL)
    engine = elastic_engine(sparse)
    requests = [(str(i), name, 4 + i, 5) for i, name in enumerate([None, *sparse.names])]

    add(engine, sparse, requests)
    outputs = run(engine)

    for request_id, name, prompt, answer in requests:
        expected = sparse.answer(name, token_ids(prompt, prompt), answer)
        assert tokens_of(outputs[request_id]) == expected, name
    assert any(slots.experts > 1 for slots in engine.runner.lora_manager.manager.pool.layers)
