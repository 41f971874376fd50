"""Running requests, the token budget and KV blocks (lab 6.3)."""

import random

import pytest

from minivllm.core.request import RequestStatus
from tests.oracles.scheduler import World

pytestmark = pytest.mark.lab("6.3")


def tokens(output):
    return {s.request.request_id: s.num_new_tokens for s in output.scheduled}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    world = World(max_num_batched_tokens=10)
    world.add(prompt=range(25), max_tokens=2)

    outputs = world.run()

    assert [(s.num_new_tokens, s.samples) for o in outputs for s in o.scheduled] == [
        (10, False),
        (10, False),
        (5, True),
        (1, True),
    ]


def test_requests_that_already_answer_go_before_a_prompt_in_the_making():
    world = World(max_num_batched_tokens=8)
    talking = world.add_all(0, 0, 0, prompt=[3], max_tokens=9)
    long = world.add(prompt=range(20), max_tokens=1)

    outputs = [world.step() for _ in range(4)]

    assert [tokens(o).get(long.request_id) for o in outputs] == [5, 5, 5, 5], (
        "what 3 answers leave of 8 tokens"
    )
    assert all(tokens(o).get(r.request_id) == 1 for o in outputs for r in talking)


def test_what_a_prompt_leaves_of_the_budget_goes_to_the_next():
    world = World(max_num_batched_tokens=10)
    world.add(prompt=range(7))
    world.add(prompt=range(100, 108))

    output = world.step()

    assert tokens(output) == {"r0": 7, "r1": 3}


def test_a_prompt_in_the_making_counts_as_running():
    world = World(max_num_batched_tokens=4, max_num_seqs=1)
    world.add(prompt=range(9))
    world.add(prompt=[1])

    outputs = [world.step(), world.step()]

    assert [o.running[0].request_id for o in outputs] == ["r0", "r0"]
    assert all(len(o.running) == 1 for o in outputs)


def test_nobody_is_admitted_once_the_budget_is_spent():
    world = World(max_num_batched_tokens=4)
    world.add(prompt=range(4))
    world.add(prompt=[1])

    output = world.step()

    assert tokens(output) == {"r0": 4}
    assert output.halted_by == "token budget"


def test_a_request_samples_only_in_the_step_that_reaches_its_last_token():
    world = World(max_num_batched_tokens=4)
    request = world.add(prompt=range(9), max_tokens=1)

    counts = []
    while not request.is_finished:
        world.step()
        counts.append(request.num_output_tokens)

    assert counts == [0, 0, 1]


def test_running_requests_beyond_the_budget_wait_for_the_next_step():
    world = World(max_num_batched_tokens=3)
    world.add_all(0, 0, prompt=[1], max_tokens=20)
    world.step(tokens_each=3)

    output = world.step(tokens_each=3)

    assert tokens(output) == {"r0": 3}
    assert len(output.running) == 2


def test_beside_one_who_answers_a_prompt_gets_what_the_smaller_budget_leaves():
    """How much a step may compute depends on who is in it already, so it is asked anew for each request."""
    world = World(max_num_batched_tokens=32, max_num_seqs=2, most_tokens_beside_decodes=8)
    answering = world.add(prompt=[1], max_tokens=9)
    world.step()
    long = world.add(prompt=range(40))

    outputs = [world.step() for _ in range(3)]

    assert [tokens(output) for output in outputs] == [{answering.request_id: 1, long.request_id: 7}] * 3


def test_a_chunk_takes_blocks_for_its_own_tokens_only():
    """Blocks for the rest of the prompt would be taken from others steps before anybody fills them."""
    world = World(max_num_batched_tokens=8, block_size=4, enable_prefix_caching=False)
    request = world.add(prompt=range(30))

    held = []
    for _ in range(3):
        world.step()
        held.append(len(request.block_ids))

    assert held == [2, 4, 6], "blocks of 4 for 8, 16 and 24 tokens"


def test_the_last_to_be_admitted_gives_way_though_it_came_before_others():
    """Admitted last is not arrived last: who was held back runs the shortest, so it has least to compute again."""
    world = World(max_loras=1, num_blocks=7, block_size=4, enable_prefix_caching=False)
    world.held[1, 0] = "being read"
    first, held_back, third = (world.add(a, prompt=range(7), max_tokens=9) for a in (0, 1, 0))
    assert world.step().running == [first, third]
    world.held.clear()

    outputs = [world.step() for _ in range(2)]

    assert outputs[0].running == [first, third, held_back]
    assert outputs[1].preempted == [held_back.request_id]


def test_who_lacks_a_block_takes_it_from_the_last_admitted():
    world = World(num_blocks=5, block_size=4)
    first, last = world.add_all(0, 0, prompt=range(7), max_tokens=9)

    preempted = [o.preempted for o in [world.step() for _ in range(3)]]

    assert preempted == [[], [], [last.request_id]]
    assert last.status == RequestStatus.PREEMPTED
    assert (last.num_computed_tokens, last.block_ids, last.num_preemptions) == (0, [], 1)
    assert first.status == RequestStatus.RUNNING


def test_the_last_admitted_gives_way_itself_when_it_lacks_a_block():
    world = World(num_blocks=5, block_size=4)
    first, last = world.add(prompt=range(9), max_tokens=7), world.add(prompt=range(30, 33), max_tokens=6)

    outputs = [world.step(), world.step(), world.step()]

    assert outputs[2].preempted == [last.request_id]
    assert tokens(outputs[2]) == {first.request_id: 1}


def test_as_many_make_way_as_it_takes():
    world = World(num_blocks=5, block_size=1, enable_prefix_caching=False)
    first, second, third = world.add_all(0, 0, 0, prompt=[1], max_tokens=4)
    world.step(tokens_each=3)

    output = world.step(tokens_each=3)

    assert output.preempted == [third.request_id, second.request_id]
    assert tokens(output) == {first.request_id: 3}


def test_nobody_is_admitted_in_a_step_that_took_blocks_away():
    world = World(num_blocks=5, block_size=4)
    first, _ = world.add_all(0, 0, prompt=range(7), max_tokens=9)
    world.step()
    world.step()
    world.add(prompt=[9], max_tokens=1)

    output = world.step()

    assert output.halted_by == "KV blocks"
    assert output.running == [first], (
        "neither the newcomer nor the one that made way has a place in this step"
    )


def test_a_preempted_request_goes_back_to_its_place_in_the_queue():
    world = World(num_blocks=5, block_size=4, max_num_seqs=2)
    requests = [world.add(prompt=range(i, i + 7), max_tokens=9) for i in (0, 10, 20)]
    for _ in range(3):
        world.step()

    waiting = list(world.scheduler.waiting)

    assert waiting == requests[1:]


def test_a_preempted_request_gets_the_tokens_it_would_have_got_undisturbed():
    world = World(num_blocks=9, block_size=4, enable_prefix_caching=False)
    requests = [world.add(prompt=range(i, i + 6), max_tokens=12) for i in range(4)]

    world.run()

    assert sum(r.num_preemptions for r in requests) > 0
    for request in requests:
        assert request.num_output_tokens == 12
        assert request.output_token_ids == world.expected_tokens(request)


def test_the_first_admitted_is_never_preempted_for_blocks():
    rng = random.Random(0)
    world = World(num_blocks=12, block_size=2, max_num_batched_tokens=8)
    for _ in range(12):
        world.add(
            prompt=[rng.randrange(5) for _ in range(rng.randrange(1, 9))], max_tokens=rng.randrange(1, 14)
        )

    while world.scheduler.has_unfinished_requests():
        head = world.scheduler.running[:1]
        output = world.step()
        assert not set(output.preempted) & {r.request_id for r in head}


def test_the_answer_does_not_depend_on_the_size_of_the_chunks():
    answers = []
    for budget in (1, 2, 5, 64):
        world = World(max_num_batched_tokens=budget, max_num_seqs=3)
        requests = [world.add(prompt=range(i, 3 * i + 2), max_tokens=5) for i in range(5)]
        world.run()
        answers.append([r.output_token_ids for r in requests])

    assert answers[0] == [world.expected_tokens(r) for r in requests]
    assert all(answer == answers[0] for answer in answers)
