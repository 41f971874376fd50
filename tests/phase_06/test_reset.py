"""A step breaks off anywhere: what is not answered yet is queued again, and nothing else is believed."""

import random
import sys

import pytest
from scheduler_model import World

import minivllm.core.scheduler as scheduler_module
from minivllm.core.request import RequestStatus
from minivllm.engine.metrics import scheduler_stats
from minivllm.guards.mending import reset

CORE = scheduler_module.__file__.removesuffix("scheduler.py")


class Interrupt(BaseException):
    """What Ctrl-C is to a step."""


def interrupted(after, call, *arguments):
    """Call it, and break it off before line `after` of those it runs in core/; False if it runs fewer."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        if event == "line":
            lines += 1
            if lines == after:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments)
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def mixed_world():
    """Requests that run, wait for a slot, wait for blocks, and are in the middle of a prompt."""
    world = World(max_loras=2, max_lora_wait_steps=3, max_num_seqs=4, num_blocks=18, max_num_batched_tokens=9)
    for number, adapter_id in enumerate([1, 2, 0, 3, 1, 4, 2, 0]):
        world.add(adapter_id, [adapter_id] * (5 + number), max_tokens=3 + number)
    for _ in range(5):
        world.step()
    return world


def unfinished(world):
    return [r for r in world.requests.values() if r.request_id in world.scheduler.requests]


def test_all_wait_again_by_arrival_with_nothing_computed():
    world = mixed_world()
    ran = list(world.scheduler.running)
    waited = list(world.scheduler.waiting)
    answers = {r: list(r.output_token_ids) for r in ran + waited}
    assert ran and waited and any(answers.values())

    reset(world.scheduler, reversed(ran + waited))

    world.check_state()
    assert list(world.scheduler.waiting) == sorted(ran + waited, key=lambda r: r.arrival_order)
    assert world.scheduler.running == []
    assert {r: r.output_token_ids for r in ran + waited} == answers, "what was told is not taken back"
    assert scheduler_stats(world.scheduler).num_free_blocks == 17
    assert {r.status for r in ran} == {RequestStatus.PREEMPTED}


def test_requests_that_are_not_given_are_forgotten():
    world = mixed_world()
    kept, *gone = unfinished(world)

    reset(world.scheduler, [kept])
    world.requests = {kept.request_id: kept}
    world.run()

    assert kept.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert not any(request.is_finished for request in gone)
    assert world.add(request_id=gone[0].request_id), "its id is free again"


def test_counters_go_on_and_those_who_ran_count_as_preempted():
    world = mixed_world()
    before = scheduler_stats(world.scheduler)
    num_running = len(world.scheduler.running)
    preemptions = {r: r.num_preemptions + (r in world.scheduler.running) for r in unfinished(world)}

    reset(world.scheduler, unfinished(world))

    after = scheduler_stats(world.scheduler)
    assert after.num_preemptions == before.num_preemptions + num_running
    assert (after.num_computed_tokens, after.num_sampled_tokens, after.prefix_cache_queries) == (
        before.num_computed_tokens,
        before.num_sampled_tokens,
        before.prefix_cache_queries,
    )
    assert {r: r.num_preemptions for r in unfinished(world)} == preemptions


def test_newcomers_come_after_those_who_are_queued_again():
    world = mixed_world()
    old = unfinished(world)

    reset(world.scheduler, old)
    newcomer = world.add()

    assert list(world.scheduler.waiting) == [*sorted(old, key=lambda r: r.arrival_order), newcomer]


def test_an_adapter_that_may_not_run_stays_held_back():
    world = mixed_world()
    world.held[4, 0] = "being read"

    reset(world.scheduler, unfinished(world))
    outputs = [world.step() for _ in range(12)]

    assert all(r.adapter_id != 4 for output in outputs for r in output.running)


def test_a_last_token_that_was_not_told_is_sampled_again():
    """It was appended, and the step broke off before anybody saw that it ends the answer."""
    world = World()
    request = world.add(max_tokens=3)
    world.step()
    world.step()
    request.output_token_ids.append(5)

    reset(world.scheduler, [request])
    world.run()

    assert request.output_token_ids == world.expected_tokens(request)
    assert request.num_output_tokens == 3


@pytest.mark.parametrize("what", ["schedule", "update"])
def test_wherever_a_step_breaks_off_every_request_ends_with_the_tokens_it_would_get_alone(what):
    """Before the first line of it, the second, and so on, until it runs to its end."""
    after, broke_off = 0, True
    while broke_off:
        # Every line of the first two hundred, then some of those that follow.
        after += 1 if after < 200 else random.Random(after).randint(5, 20)
        world = mixed_world()
        answered = [r for r in world.requests.values() if r.is_finished]
        if what == "schedule":
            broke_off = interrupted(after, world.scheduler.schedule)
        else:
            output = world.schedule()
            sampled = world.execute(output)
            broke_off = interrupted(after, world.scheduler.update_from_output, output, sampled)
        reset(world.scheduler, (r for r in world.requests.values() if r not in answered))
        world.check_state()
        world.run()

        for request in world.requests.values():
            assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            assert request.output_token_ids == world.expected_tokens(request), f"broke off at line {after}"
            assert request.num_output_tokens == request.sampling_params.max_tokens
    assert after > 50, "the step was to have lines to break off at"
