"""A step in which somebody decodes may have fewer tokens than others."""

import random

from tests.oracles.scheduler import World


def world_of(most, **options):
    return World(**{"max_num_seqs": 4, "most_tokens_beside_decodes": most, **options})


def tokens(output):
    return {s.request.request_id: s.num_new_tokens for s in output.scheduled}


def test_prompts_that_nobody_decodes_beside_have_the_whole_budget():
    world = world_of(8, max_num_batched_tokens=40)
    world.add(prompt=range(30))
    world.add(prompt=range(100, 120))

    assert tokens(world.step()) == {"r0": 30, "r1": 10}


def test_the_larger_of_both_bounds_nothing():
    world = world_of(64, max_num_batched_tokens=10)
    world.add(prompt=[3], max_tokens=9)
    world.step()
    world.add(prompt=range(20))

    assert tokens(world.step()) == {"r0": 1, "r1": 9}


def test_where_as_many_may_decode_nothing_is_bounded():
    world = world_of(8, max_num_batched_tokens=10, max_num_seqs=8)
    world.add(prompt=[3], max_tokens=9)
    world.step()
    world.add(prompt=range(20))

    assert tokens(world.step()) == {"r0": 1, "r1": 9}


def test_random_traffic_keeps_the_bound_and_everybody_ends():
    """Steps that begin with a decode hold at most so many tokens; every decode is in its step; nobody starves."""
    draw = random.Random(7)
    world = world_of(12, max_num_batched_tokens=30, max_num_seqs=8)
    requests = []
    chunked = 0
    for _ in range(400):
        if draw.random() < 0.5 and len(requests) < 150:
            first = 100 * len(requests)
            prompt = range(first, first + draw.randint(1, 40))
            requests.append(world.add(prompt=prompt, max_tokens=draw.randint(1, 12)))
        decoding = [r for r in world.scheduler.running if r.num_tokens - r.num_computed_tokens == 1]
        output = world.step()
        if output is None or not output.scheduled:
            continue
        total = sum(s.num_new_tokens for s in output.scheduled)
        if output.scheduled[0].num_new_tokens == 1:
            assert total <= 12
            assert {r.request_id for r in decoding} <= tokens(output).keys() | set(output.preempted)
            chunked += total == 12
        assert total <= 30
    while any(not r.is_finished for r in requests):
        world.step()
    assert chunked > 20
