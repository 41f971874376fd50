"""Whose keys and values a cached block holds (lab 6.5; incident 7)."""

import random
from array import array
from itertools import product

import pytest

from minivllm.config import CacheConfig
from minivllm.core.kv_cache import KVCacheManager, hash_block_tokens
from minivllm.observe.reports import scheduler_stats
from minivllm.sampling_params import SamplingParams
from tests.oracles.scheduler import ShownRequest, World, lora

pytestmark = pytest.mark.lab("6.5")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def hit(world, adapter_id, prompt=PROMPT):
    """Tokens that a new request finds in the cache."""
    request = world.add(adapter_id, prompt=prompt, max_tokens=1)
    world.run()
    assert request.output_token_ids == world.expected_tokens(request)
    return request.num_cached_tokens


def computed(cache, prompt, lora_request):
    """A request whose prompt is computed, and can be found."""
    request = ShownRequest("r", list(prompt), SamplingParams(), lora_request)
    cache.get_computed_blocks(request)
    cache.allocate_slots(request, len(prompt))
    cache.cache_blocks(request, len(prompt))
    return request


@pytest.mark.parametrize("adapter_id", [0, 1])
def test_a_prompt_seen_before_is_found_in_full_blocks_by_the_same_adapter(adapter_id):
    world = World(block_size=4)

    assert hit(world, adapter_id) == 0
    assert hit(world, adapter_id) == 8, "10 tokens in blocks of 4: the first request left two full blocks"


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 2)])
def test_no_hit_crosses_adapters(first, second):
    world = World(block_size=4)
    world.loads.update({1: 101, 2: 102})
    hit(world, first)

    assert hit(world, second) == 0, "the same prompt, and not the same weights"


def test_a_reloaded_adapter_finds_nothing_of_its_former_load():
    """Same name, same id, other weights: what vLLM #30931 and llama.cpp #26207 served stale."""
    world = World(block_size=4)
    hit(world, 1)
    world.reload(1)

    assert hit(world, 1) == 0
    assert hit(world, 1) == 8


def test_an_adapter_that_is_not_loaded_finds_nothing_before_its_load_is_known():
    world = World(block_size=4)
    hit(world, 1)
    hit(world, 0)  # neither its own of the last load, nor base's
    world.loads.clear()

    assert hit(world, 1) == 0


def test_a_first_request_shorter_than_a_block_fills_blocks_that_are_found():
    """Whose its tokens are is known from the first on, though it is looked up again only when a block is full."""
    world = World(block_size=4)
    request = world.add(1, prompt=[3, 1], max_tokens=9)
    world.run()

    assert hit(world, 1, prompt=request.all_token_ids) == 8


def test_blocks_computed_before_and_after_a_load_in_mid_request_are_not_mixed():
    """The adapter leaves memory while its request runs and is read again: nobody may find what follows."""
    world = World(block_size=4, max_num_batched_tokens=6)
    request = world.add(1, prompt=PROMPT, max_tokens=1)
    world.step()
    world.loads.clear()
    world.run()
    assert request.is_finished

    cached = world.scheduler.kv_cache.block_pool.hash_of

    assert len(cached) == 1, "one block was full before the load, and who computed the other is not known"
    assert hit(world, 1) == 0


def test_only_what_is_equal_from_the_first_token_on_is_found():
    world = World(block_size=4)
    hit(world, 0)

    assert hit(world, 0, [*PROMPT[:4], 8, 8, 8, 8, 8]) == 4, "the first block of 4 is the same"
    assert hit(world, 0, [7, *PROMPT[1:]]) == 0, "the first token differs, and so does all that follows it"
    assert hit(world, 0, PROMPT[4:]) == 0, "the same tokens at other positions"


def test_a_hit_never_covers_the_whole_prompt():
    world = World(block_size=4)
    hit(world, 0, PROMPT[:8])

    assert hit(world, 0, PROMPT[:8]) == 4, "the last of the 8 tokens must be computed"
    assert hit(world, 0, PROMPT[:9]) == 8


def test_an_answer_is_found_by_the_prompt_that_continues_it():
    world = World(block_size=4)
    first = world.add(1, prompt=PROMPT, max_tokens=9)
    world.run()

    assert hit(world, 1, [*PROMPT, *first.output_token_ids]) == 16


def test_nothing_is_found_when_the_prefix_cache_is_off():
    world = World(block_size=4, enable_prefix_caching=False)
    hit(world, 0)

    assert hit(world, 0) == 0
    assert scheduler_stats(world.scheduler).num_cached_blocks == 0


def test_keys_differ_whenever_identity_parent_or_tokens_do():
    parents = [None, bytes(16), bytes(15) + b"\1", *(hash_block_tokens(None, [i], 0) for i in range(3))]
    blocks = [t for n in (1, 2) for t in product((-1, 0, 1, 256, 2**40), repeat=n)]

    keys = [hash_block_tokens(p, t, i) for p in parents for t in blocks for i in (0, 1, 2, 256)]

    distinct = len(set(keys))
    assert distinct == 6 * 30 * 4, f"{6 * 30 * 4} blocks that differ have {distinct} keys"


def test_every_byte_of_the_parent_counts():
    """The parent stands for all tokens before the block; of part of a digest two are soon alike."""
    parent = bytes(range(100, 116))
    others = [parent[:i] + b"\0" + parent[i + 1 :] for i in range(16)]

    keys = [hash_block_tokens(other, [5, 6], 1) for other in others]

    same = [i for i, key in enumerate(keys) if key == hash_block_tokens(parent, [5, 6], 1)]
    assert same == [], f"a parent that differs in one of bytes {same} has the same key"


def test_blocks_behind_one_that_is_gone_are_not_found():
    """A prefix has no holes: what is found second would be read as what comes first."""
    cache = KVCacheManager(CacheConfig(block_size=4, num_blocks=10), {}.get)
    request = computed(cache, PROMPT, lora(0))
    _, second, _ = request.block_ids
    cache.block_pool.touch([second])  # somebody goes on using it
    cache.free(request)
    cache.block_pool.get_new_blocks(cache.block_pool.get_num_free_blocks())

    found = cache.get_computed_blocks(request)

    assert found == [], f"block {second} holds tokens 4 to 7 of the prompt, and tokens 0 to 3 are gone"


def test_a_request_that_comes_back_finds_nothing_of_a_load_that_is_gone():
    """Preempted, and meanwhile its adapter left memory and was read again: the files may have changed."""
    loads = {1: 7}
    cache = KVCacheManager(CacheConfig(block_size=4, num_blocks=10), loads.get)
    request = computed(cache, PROMPT, lora(1))
    cache.free(request)
    request.num_preemptions += 1
    found = len(cache.get_computed_blocks(request))

    loads[1] = 8

    assert found == 2, "while the load is the same, the request finds what it computed"
    assert cache.get_computed_blocks(request) == [], "load 8 did not compute what load 7 left behind"


def test_a_request_that_comes_back_finds_its_answer_as_well_as_its_prompt():
    """Of 4 tokens of prompt and 8 of answer, all but the last may be found: two blocks of 4."""
    cache = KVCacheManager(CacheConfig(block_size=4, num_blocks=10), {}.get)
    request = ShownRequest("r", [3, 1, 4, 1], SamplingParams(max_tokens=9), lora(0))
    for token_id in (5, 9, 2, 6, 5, 3, 5, 8):
        request.append_output_token(token_id)
    cache.get_computed_blocks(request)
    cache.allocate_slots(request, 11)
    cache.cache_blocks(request, 11)
    computed_blocks = request.block_ids[:2]
    cache.free(request)

    found = cache.get_computed_blocks(request)

    assert found == computed_blocks, f"{request.num_tokens} tokens, of which 11 were computed"


SEVEN_FORTY = array("q", [7, 40]).tobytes()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # hash(-1) == hash(-2) in Python; a tenant who can choose tokens must not find another's blocks.
        pytest.param((None, [-1], 0), (None, [-2], 0), id="tokens -1 and -2"),
        pytest.param((None, [1, 23], 5), (None, [12, 3], 5), id="tokens 1 23 and 12 3"),
        pytest.param((None, [2], 11), (None, [12], 1), id="identities 11 and 1, and the tokens behind them"),
        pytest.param((None, [40, 2, 50], 7), (SEVEN_FORTY, [50], 2), id="numbers as a parent"),
    ],
)
def test_keys_are_digests_in_which_nothing_runs_together(one, other):
    assert hash_block_tokens(*one) != hash_block_tokens(*other), f"{one} and {other} have one key"
    assert hash_block_tokens(*one) == hash_block_tokens(one[0], tuple(one[1]), one[2]), (
        "equal blocks, other keys"
    )
    assert len(hash_block_tokens(*one)) == 16


def test_many_tenants_with_the_same_prompts_each_find_their_own():
    rng = random.Random(1)
    world = World(block_size=4, max_loras=3, num_blocks=60)
    prompts = [[rng.randrange(5) for _ in range(12)] for _ in range(3)]
    for _ in range(120):
        world.add(rng.randrange(4), rng.choice(prompts)[: rng.randint(1, 12)], rng.randint(1, 6))
        if rng.random() < 0.3:
            world.run()
    world.run()

    assert all(r.output_token_ids == world.expected_tokens(r) for r in world.requests.values())
    assert scheduler_stats(world.scheduler).prefix_cache_hits > 0
