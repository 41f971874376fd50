"""Any history: arrivals, aborts, pins, reloads, adapters that leave memory, dropped steps.

`World` checks every step: no slot, block or reference leaked or owned twice, no limit exceeded, first come
first served within an adapter, and no context read that is not the request's own.
"""

import random

import pytest

from minivllm.core.request import RequestStatus
from minivllm.observe.reports import scheduler_stats
from tests.oracles.scheduler import World
from tests.tools.nights import by_day

NUM_ADAPTERS = 5


def random_world(rng):
    block_size = rng.choice([1, 2, 4, 7])
    world = World(
        max_loras=rng.randint(1, 4),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.choice([1, 3, 8, 30]),
        max_lora_wait_steps=rng.choice([1, 3, 10]),
        block_size=block_size,
        num_blocks=2 + 30 // block_size + rng.choice([0, 3, 60]),
        enable_prefix_caching=rng.random() < 0.8,
        max_model_len=30,
    )
    share, coin = rng.choice([0, 0.5]), random.Random(rng.random())
    world.scheduler.can_prefetch = lambda adapter_id: coin.random() < share
    return world


def random_request(world, rng, prompts):
    prompt = rng.choice(prompts)[: rng.randint(1, 24)]
    return world.add(rng.randrange(NUM_ADAPTERS + 1), prompt, rng.randint(1, 12))


def disturb(world, rng):
    """One of the things that happen to a server between two steps."""
    match rng.randrange(6):
        case 0 if world.scheduler.requests:
            world.abort(rng.choice(list(world.scheduler.requests.values())))
        case 1:
            world.pinned = set(rng.sample(range(1, NUM_ADAPTERS + 1), rng.randint(0, world.max_loras - 1)))
        case 2:
            world.reload(rng.randint(1, NUM_ADAPTERS))
        case 3 if world.loads:
            world.loads.pop(rng.choice(list(world.loads)))
        case 4:
            world.schedule()
        case 5 if world.scheduler.requests:
            output = world.schedule()
            world.abort(rng.choice(list(world.scheduler.requests.values())))
            world.finish_step(output)


@pytest.mark.parametrize("seed", by_day(range(48)))
def test_every_request_ends_with_the_tokens_it_would_get_alone(seed):
    rng = random.Random(seed)
    world = random_world(rng)
    prompts = [[rng.randrange(3) for _ in range(24)] for _ in range(2)]

    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 3])):
            random_request(world, rng, prompts)
        if rng.random() < 0.3:
            disturb(world, rng)
        world.step(tokens_each=rng.choice([1, 1, 1, 2]))
    world.pinned = set()
    world.run()

    for request in world.requests.values():
        assert request.output_token_ids == world.expected_tokens(request)
        if request.status != RequestStatus.FINISHED_ABORTED:
            assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            longest = max(30, request.num_prompt_tokens + 1)
            wanted = request.num_prompt_tokens + request.sampling_params.max_tokens
            assert request.num_tokens == min(wanted, longest)
    assert scheduler_stats(world.scheduler).kv_cache_usage == 0


def test_the_histories_meet_everything_that_can_happen():
    """Or they would prove little."""
    met = set()
    for seed in range(12):
        rng = random.Random(seed)
        world = random_world(rng)
        prompts = [[rng.randrange(3) for _ in range(24)] for _ in range(2)]
        for _ in range(40):
            random_request(world, rng, prompts)
        for output in world.run():
            met |= {skip.reason for skip in output.skipped} | {output.halted_by}
            met |= {"eviction"} if output.preempted_adapters else set()
            met |= {"preemption"} if output.preempted and not output.preempted_adapters else set()
            met |= {"hit"} if any(output.cached_tokens.values()) else set()
            met |= {"chunk"} if any(not s.samples for s in output.scheduled) else set()

    assert met >= {"max_loras", "max_num_seqs", "token budget", "KV blocks"}
    assert met >= {"eviction", "preemption", "hit", "chunk"}
