"""Requests come, stop, are refused, aborted, or belong to a step that is dropped."""

import pytest

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.observe.reports import scheduler_stats
from minivllm.sampling_params import SamplingParams
from tests.oracles.scheduler import World


def one_step(scheduler, *token_ids):
    """Schedule, and give every sampling request these tokens."""
    output = scheduler.schedule()
    return scheduler.update_from_output(
        output, {s.request.request_id: list(token_ids) for s in output.scheduled if s.samples}
    )


def base_scheduler(max_model_len=None, **cache):
    return Scheduler(
        SchedulerConfig(), CacheConfig(**{"num_blocks": 20, **cache}), max_model_len=max_model_len
    )


# What is refused at the door.


def test_an_id_in_use_is_refused():
    world = World()
    world.add(request_id="same")

    with pytest.raises(ValueError, match="request id 'same' is in use"):
        world.add(request_id="same")

    assert len(world.scheduler.waiting) == 1


def test_an_id_may_be_used_again_once_its_request_is_finished():
    world = World()
    world.add(request_id="same")
    world.run()

    again = world.add(request_id="same")
    world.run()

    assert again.status == RequestStatus.FINISHED_LENGTH_CAPPED


def test_a_request_with_an_adapter_is_refused_when_lora_is_off():
    world = World(max_loras=0)

    with pytest.raises(ValueError, match=r"'adapter-3' but LoRA is off.*enable_lora=True"):
        world.add(3)

    assert not world.scheduler.has_unfinished_requests()


def test_a_request_that_can_never_fit_in_the_cache_is_refused():
    world = World(num_blocks=5, block_size=4)

    with pytest.raises(ValueError, match=r"may need 5 KV blocks \(17 tokens\) but the cache has 4"):
        world.add(prompt=range(10), max_tokens=8)

    assert not world.scheduler.has_unfinished_requests()


def test_a_request_that_fits_to_the_last_block_is_served():
    world = World(num_blocks=5, block_size=4)
    request = world.add(prompt=range(10), max_tokens=7)

    world.run()

    assert request.output_token_ids == world.expected_tokens(request)
    assert request.num_output_tokens == 7


def test_the_longest_context_bounds_what_a_request_may_need():
    world = World(num_blocks=5, block_size=4, max_model_len=12)
    request = world.add(prompt=range(10), max_tokens=100)

    world.run()

    assert request.num_output_tokens == 2
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED


# How a request ends.


@pytest.mark.parametrize(
    ("params", "tokens", "status", "stop_reason"),
    [
        ({"max_tokens": 3}, [5, 5, 5], RequestStatus.FINISHED_LENGTH_CAPPED, None),
        ({"max_tokens": 9}, [5, 2], RequestStatus.FINISHED_STOPPED, None),
        ({"max_tokens": 4, "ignore_eos": True}, [2] * 4, RequestStatus.FINISHED_LENGTH_CAPPED, None),
        ({"max_tokens": 9, "stop_token_ids": [7, 8]}, [5, 8], RequestStatus.FINISHED_STOPPED, 8),
        (
            {"max_tokens": 9, "stop_token_ids": [2], "ignore_eos": True},
            [5, 2],
            RequestStatus.FINISHED_STOPPED,
            2,
        ),
        ({"max_tokens": 9, "min_tokens": 3}, [2, 2, 2], RequestStatus.FINISHED_STOPPED, None),
        ({"max_tokens": 2}, [5, 2], RequestStatus.FINISHED_STOPPED, None),
    ],
)
def test_a_request_ends_where_its_parameters_say(params, tokens, status, stop_reason):
    scheduler = base_scheduler()
    request = Request("r", [1, 2, 3], SamplingParams(**params), eos_token_ids=frozenset([2]))
    scheduler.add_request(request)

    for token_id in tokens:
        assert not request.is_finished
        one_step(scheduler, token_id)

    assert (request.status, request.stop_reason) == (status, stop_reason)
    assert request.output_token_ids == tokens
    assert request.num_output_tokens == len(tokens)


def test_tokens_after_the_one_that_ends_a_request_are_dropped():
    scheduler = base_scheduler()
    request = Request("r", [1], SamplingParams(max_tokens=9), eos_token_ids=frozenset([2]))
    scheduler.add_request(request)

    one_step(scheduler, 5, 2, 6, 6)

    assert request.output_token_ids == [5, 2]


def test_the_context_length_ends_a_request_even_before_its_min_tokens():
    scheduler = base_scheduler(max_model_len=4)
    request = Request("r", [1, 2], SamplingParams(max_tokens=9, min_tokens=9))
    scheduler.add_request(request)

    for _ in range(9):
        one_step(scheduler, 5)

    assert request.num_tokens == 4
    assert request.status.finish_reason == "length"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RequestStatus.FINISHED_STOPPED, "stop"),
        (RequestStatus.FINISHED_LENGTH_CAPPED, "length"),
        (RequestStatus.FINISHED_ABORTED, "abort"),
        (RequestStatus.FINISHED_ERROR, "error"),
        (RequestStatus.RUNNING, None),
    ],
)
def test_a_status_has_the_finish_reason_of_the_api(status, reason):
    assert status.finish_reason == reason
    assert status.is_finished == (reason is not None)


def test_update_returns_the_requests_that_got_tokens_in_order():
    world = World(max_num_batched_tokens=6)
    short, long = world.add(prompt=[1], max_tokens=2), world.add(prompt=range(9), max_tokens=1)

    changed = [world.finish_step(world.schedule()) for _ in range(3)]

    assert changed == [[short], [short, long], []]


# Aborts.


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_can_be_aborted_at_any_time_between_steps(steps):
    world = World(max_num_seqs=1)
    running, waiting = world.add_all(1, 2, max_tokens=9)
    for _ in range(steps):
        world.step()

    world.abort(running, waiting)

    assert not world.scheduler.has_unfinished_requests()
    assert scheduler_stats(world.scheduler).kv_cache_usage == 0
    assert running.status == waiting.status == RequestStatus.FINISHED_ABORTED


def test_a_request_aborted_while_its_step_is_computed_gets_no_token_and_stays_dead():
    world = World()
    aborted, other = world.add_all(1, 2, prompt=range(6))
    output = world.schedule()

    world.abort(aborted)
    changed = world.finish_step(output)

    assert changed == [other]
    assert aborted.output_token_ids == []
    assert aborted.status == RequestStatus.FINISHED_ABORTED
    assert world.scheduler.running == [other]


def test_what_an_aborted_step_did_not_compute_is_never_found():
    world = World(block_size=4)
    aborted = world.add(prompt=range(9))
    world.schedule()
    world.abort(aborted)

    again = world.add(prompt=range(9))
    world.run()

    assert again.num_cached_tokens == 0


def test_aborting_twice_or_an_unknown_id_does_nothing():
    world = World()
    request = world.add()
    world.step()

    first = world.scheduler.finish_requests(["nobody", request.request_id], RequestStatus.FINISHED_ABORTED)
    second = world.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR, "late")

    assert (first, second) == ([request], [])
    assert (request.status, request.error) == (RequestStatus.FINISHED_ABORTED, None)
    world.check_state()


def test_one_id_given_twice_is_ended_once():
    world = World()
    request = world.add()
    world.step()

    ended = world.scheduler.finish_requests([request.request_id] * 2, RequestStatus.FINISHED_ABORTED)

    assert ended == [request]
    world.check_state()


# A step that could not be computed is dropped.


def test_scheduling_again_without_an_update_gives_the_same_step():
    world = World(max_num_batched_tokens=12, max_num_seqs=4)
    world.add_all(1, 2, 3, 0, 1, prompt=range(5), max_tokens=9)
    world.step()

    first = world.schedule()
    blocks = scheduler_stats(world.scheduler).num_free_blocks
    second = world.schedule()

    assert first.scheduled
    assert second.scheduled == first.scheduled
    assert scheduler_stats(world.scheduler).num_free_blocks == blocks


def test_a_request_passed_over_in_a_dropped_step_has_begun_to_wait():
    """The batch is full from that step on, so no later step asks the waiter: its wait must begin there.

    It counts from the next step that is computed.
    """
    world = World(max_loras=1, max_lora_wait_steps=4, max_num_seqs=2)
    world.add_all(1, 2, 1, max_tokens=50)
    waiter = list(world.scheduler.waiting)[1]
    world.schedule()

    steps = [waiter in world.step().running for _ in range(6)]

    # After four steps it takes the slot of adapter 1.
    assert steps == [False, False, False, False, True, True]


def test_a_dropped_step_adds_nothing_to_any_wait_and_computes_nothing():
    world = World(max_loras=1, max_lora_wait_steps=3, block_size=4)
    running, waiter = world.add_all(1, 2, prompt=range(9), max_tokens=30)

    for _ in range(10):
        output = world.schedule()

    assert output.preempted == []
    assert (running.num_computed_tokens, world.waited(waiter)) == (0, 0)
    assert scheduler_stats(world.scheduler).num_cached_blocks == 0


def test_a_dropped_step_goes_on_without_the_requests_at_fault():
    world = World(max_loras=2, block_size=4)
    good, bad, waiting = world.add_all(1, 2, 3, prompt=range(9))
    world.schedule()

    world.scheduler.finish_requests(bad.request_id, RequestStatus.FINISHED_ERROR, "adapter is corrupt")
    output = world.step()

    assert output.running == [good, waiting]
    world.run()
    assert good.output_token_ids == world.expected_tokens(good)


# Pins.


def test_with_every_slot_pinned_for_others_a_request_is_refused_with_the_reason():
    world = World(max_loras=2)
    world.pinned = {4, 5}
    base, mine, other = world.add_all(0, 4, 6)

    output = world.step()

    assert output.refused == [other]
    assert other.status == RequestStatus.FINISHED_ERROR
    assert "adapter 'adapter-6' needs a slot but all 2 are pinned for others" in other.error
    assert output.running == [base, mine]


def test_refused_requests_do_not_wait_for_the_batch_to_have_room():
    world = World(max_loras=1, max_num_seqs=1)
    world.pinned = {4}
    world.add_all(0, 0, max_tokens=9)
    other = world.add(6)

    output = world.step()

    assert output.refused == [other]


def test_a_running_request_loses_its_slot_to_pins_and_is_refused():
    world = World(max_loras=1)
    request = world.add(1, max_tokens=9)
    world.step()
    world.pinned = {2}

    output = world.step()

    assert output.refused == [request]
    assert request.block_ids == []
    assert not world.scheduler.has_unfinished_requests()


# What is counted.


def test_the_statistics_count_tokens_blocks_and_hits():
    world = World(block_size=4, num_blocks=11)
    world.add(prompt=range(9), max_tokens=3)
    world.run()
    running = world.add(prompt=range(9), max_tokens=3)
    waiting = world.add(prompt=range(20, 52), max_tokens=1)
    world.step()

    stats = scheduler_stats(world.scheduler)

    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1)
    # Two prompts of 9 tokens were looked up; the second finds the first one's two full blocks, and computes one token.
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (9 + 9, 8)
    assert (stats.num_computed_tokens, stats.num_sampled_tokens) == (9 + 2 + 1, 3 + 1)
    # 10 blocks are usable, of which the running request has 3. The waiting one needs 8.
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (7, 2)
    assert stats.kv_cache_usage == pytest.approx(0.3)
    assert (running.num_cached_tokens, waiting.num_cached_tokens) == (8, 0)


def test_what_a_preempted_request_finds_of_itself_is_not_counted_as_cached_prompt():
    world = World(num_blocks=7, block_size=4)
    first, second = (world.add(prompt=range(i, i + 8), max_tokens=9) for i in (0, 50))

    world.run()

    assert second.num_preemptions > 0
    assert first.num_cached_tokens == second.num_cached_tokens == 0
