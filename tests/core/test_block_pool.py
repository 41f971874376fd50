"""Blocks are owned, shared, given back and found again."""

import random
from collections import Counter

import pytest

from minivllm.core.block_pool import BlockPool
from tests.oracles.scheduler import World


def test_asking_for_more_than_is_free_changes_nothing():
    pool = BlockPool(4)
    pool.get_new_blocks(1)

    with pytest.raises(ValueError, match="3 blocks asked for but only 2 are free"):
        pool.get_new_blocks(3)

    assert pool.get_num_free_blocks() == 2


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockPool(1)


def test_freeing_a_block_twice_is_an_error():
    pool = BlockPool(4)
    block_ids = pool.get_new_blocks(1)
    pool.free_blocks(block_ids)

    with pytest.raises(ValueError, match="freed twice"):
        pool.free_blocks(block_ids)

    assert pool.get_num_free_blocks() == 3


def test_blocks_nobody_can_find_are_handed_out_before_those_that_can_be_found():
    pool = BlockPool(5)
    block_ids = pool.get_new_blocks(4)
    for block_id in block_ids[:3]:
        pool.cache_block(block_id, bytes([block_id]))
    pool.free_blocks(block_ids)

    order = [pool.get_new_blocks(1)[0] for _ in range(4)]

    assert order == [block_ids[3], *block_ids[:3]]


def test_found_blocks_are_evicted_least_recently_used_first():
    pool = BlockPool(4)
    one, two, three = pool.get_new_blocks(3)
    for block_id in (one, two, three):
        pool.cache_block(block_id, bytes([block_id]))
    pool.free_blocks([one, two, three])
    pool.touch([one])
    pool.free_blocks([one])

    assert pool.get_new_blocks(3) == [two, three, one]


def test_the_end_of_a_finished_request_is_evicted_before_its_beginning():
    world = World(num_blocks=5, block_size=4)
    first = world.add(prompt=range(12), max_tokens=1)
    world.run()
    assert first.is_finished
    world.add(prompt=range(50, 58), max_tokens=1)
    world.run()

    again = world.add(prompt=range(12), max_tokens=1)
    world.run()

    assert again.num_cached_tokens == 8


def test_running_requests_share_the_blocks_of_their_prefix():
    world = World(block_size=4)
    prompt = list(range(9))
    first = world.add(prompt=prompt, max_tokens=9)
    world.step()
    second = world.add(prompt=prompt, max_tokens=9)
    world.step()

    assert second.block_ids[:2] == first.block_ids[:2]
    assert set(second.block_ids[2:]).isdisjoint(first.block_ids)


def test_the_pool_agrees_with_a_multiset_of_owners_after_any_history():
    rng = random.Random(7)
    pool, owners, known = BlockPool(9), Counter(), {}
    for _ in range(3000):
        used = [b for b in owners if owners[b]]
        match rng.randrange(4):
            case 0 if len(used) < 8:
                block_ids = pool.get_new_blocks(rng.randint(1, 8 - len(used)))
                assert not set(block_ids) & set(used)
                owners.update(block_ids)
                known = {key: b for key, b in known.items() if b not in block_ids}
            case 1 if used:
                block_id = rng.choice(used)
                pool.free_blocks([block_id])
                owners[block_id] -= 1
            case 2 if used:
                block_id, key = rng.choice(used), bytes([rng.randrange(12)])
                if block_id not in known.values():
                    pool.cache_block(block_id, key)
                    known.setdefault(key, block_id)
            case 3 if known:
                block_id = rng.choice(sorted(known.values()))
                pool.touch([block_id])
                owners[block_id] += 1

        assert pool.ref_cnt == [owners[b] for b in range(9)]
        assert set(pool.free) == {b for b in range(1, 9) if not owners[b]}
        assert pool.block_of == known
