"""A request whose adapter does not fit lets others pass (lab 6.2)."""

import pytest

from minivllm.core.output import MAX_LORAS, RELOAD_PENDING
from minivllm.observe.recorder import Skip
from tests.oracles.scheduler import World

pytestmark = pytest.mark.lab("6.2")


def ids(requests):
    return [r.request_id for r in requests]


def test_those_behind_a_skipped_request_are_admitted():
    world = World(max_loras=1)
    world.add_all(1, 2, 1, 0)

    output = world.step()

    assert ids(output.running) == ["r0", "r2", "r3"]


def test_a_skip_names_the_request_its_adapter_and_the_reason():
    world = World(max_loras=1)
    world.add_all(1, 2, 3)

    output = world.step()

    assert output.skipped == [Skip("r1", 2, MAX_LORAS), Skip("r2", 3, MAX_LORAS)]
    assert output.passed_over == {2: MAX_LORAS, 3: MAX_LORAS}, "adapter -> why its requests wait"


def test_a_skipped_request_keeps_its_place_in_the_queue():
    world = World(max_loras=1)
    world.add_all(1, 2, 3, max_tokens=1)
    world.step()

    outputs = [world.step(), world.step()]

    assert [ids(o.running) for o in outputs] == [["r1"], ["r2"]]


def test_a_skipped_request_is_admitted_as_soon_as_a_slot_is_free():
    world = World(max_loras=1)
    world.add(1, max_tokens=2)
    world.step()
    waiter = world.add(2)
    assert waiter.request_id not in ids(world.step().running)

    output = world.step()

    assert ids(output.running) == [waiter.request_id]


def test_a_request_passed_over_goes_before_those_who_came_later_for_the_same_slot():
    world = World(max_loras=1)
    world.add(1, max_tokens=2)
    first, _, second = world.add_all(2, 3, 2)
    world.step()
    world.step()

    output = world.step()

    assert ids(output.running) == ids([first, second])


def test_a_request_passed_over_waits_by_the_step_until_it_has_a_slot():
    world = World(max_loras=1)
    world.add(1, max_tokens=3)
    waiter = world.add(2, max_tokens=9)

    waited = []
    for _ in range(5):
        world.step()
        waited.append(world.waited(waiter))

    assert waited == [1, 2, 3, 3, 3], "who is skipped for its adapter begins to wait: pass_over"


def test_a_slot_goes_to_who_was_passed_over_not_to_who_is_first_by_arrival():
    world = World(max_loras=1)
    world.add(3, max_tokens=2)
    first, passed_over = world.add_all(1, 2)
    world.held[1, 0] = "being read"
    world.step()
    world.step()
    world.held.clear()

    output = world.step()

    assert output.running == [passed_over], f"{first} came first, but has not waited: see line"


def test_nobody_is_skipped_once_the_batch_is_full():
    """Who would not have got in anyway was not passed over for its adapter."""
    world = World(max_loras=1, max_num_seqs=1)
    world.add_all(1, 2)

    output = world.step()

    assert output.skipped == [], "the batch was full, so nobody lost its place for its adapter"
    assert output.halted_by == "max_num_seqs"


@pytest.mark.parametrize(
    ("full_by", "limits"),
    [("max_num_seqs", {"max_num_seqs": 2}), ("token budget", {"max_num_batched_tokens": 2})],
)
def test_nobody_joins_a_step_that_running_requests_have_filled(full_by, limits):
    """It is full before the first admission, not only after one: 2 rows, or a budget of 2 tokens, are taken."""
    world = World(**limits)
    running = world.add_all(0, 0)
    world.step()
    late = world.add(0)

    output = world.step()

    assert output.running == running
    assert (output.halted_by, late.num_computed_tokens, late.block_ids) == (full_by, 0, [])


def test_who_finds_the_step_full_was_not_asked():
    world = World(max_loras=1, max_num_seqs=2)
    first, passed_over, base, _ = world.add_all(1, 2, 0, 1)

    began = world.step()
    world.abort(first, base)
    turned = world.step()

    assert began.asked == [first.arrival_order, passed_over.arrival_order, base.arrival_order]
    assert began.halted_by == "max_num_seqs", "the last one was in line, and not asked"
    assert turned.asked[0] == (0, passed_over.arrival_order), "it waits for a slot since step 0"


def test_who_lacks_blocks_was_asked_and_ended_the_step():
    world = World(num_blocks=9, block_size=4)
    world.add(0, prompt=range(16), max_tokens=5)
    world.step()
    big = world.add(0, prompt=[5] * 24, max_tokens=1)
    world.add(0, prompt=[1], max_tokens=1)

    output = world.step()

    assert (output.asked, output.skipped) == ([big.arrival_order], [])
    assert output.passed_over == {}, (
        "what it lacks is blocks, and `halted_by` says so: its adapter is no reason"
    )


def test_max_num_seqs_counts_requests_of_every_adapter():
    world = World(max_loras=2, max_num_seqs=3)
    world.add_all(1, 0, 3, 2, 1, 2)

    output = world.step()

    assert len(output.running) == 3


@pytest.mark.parametrize("adapter_id", [0, 1])
def test_a_request_that_lacks_blocks_is_not_overtaken(adapter_id):
    """Blocks come free little by little: if small requests passed, a big one might wait for ever."""
    world = World(num_blocks=9, block_size=4)
    world.add(0, prompt=range(16), max_tokens=5)
    world.step()
    big = world.add(0, prompt=[5] * 24, max_tokens=1)
    small = world.add(adapter_id, prompt=[1], max_tokens=1)

    output = world.step()

    assert output.halted_by == "KV blocks"
    assert big not in output.running
    assert small not in output.running


def test_requests_for_a_reloaded_adapter_wait_until_those_of_the_old_load_are_done():
    world = World(max_loras=1)
    old = world.add(1, max_tokens=3)
    world.step()
    world.reload(1)
    new, base = world.add_all(1, 0)

    output = world.step()

    assert output.running == [old, base]
    assert output.skipped == [Skip(new.request_id, 1, RELOAD_PENDING)]
    assert output.passed_over == {1: RELOAD_PENDING}, "adapter -> why its requests wait"
    assert world.waited(new) == 0


def test_a_preempted_request_of_the_old_load_still_goes_before_those_of_the_new_one():
    world = World(max_loras=2)
    old, *others = world.add_all(1, 2, 2, max_tokens=9)
    world.step()
    world.reload(1)
    new = world.add(1)
    world.pinned = {3}
    assert world.step().running == others
    world.pinned = set()

    output = world.step()

    assert output.running == [*others, old]
    assert output.skipped == [Skip(new.request_id, 1, RELOAD_PENDING)]


def test_an_adapter_blocked_by_the_engine_is_skipped_with_the_engines_reason():
    world = World(max_loras=1)
    blocked, other = world.add_all(1, 0)
    world.held[1, 0] = "adapter 'adapter-1' is being read"

    output = world.step()

    assert output.running == [other]
    assert output.skipped == [Skip(blocked.request_id, 1, "adapter 'adapter-1' is being read")]


def test_who_is_held_back_does_not_wait_for_a_slot():
    """A slot would not help it, and nobody may lose one for it."""
    world = World(max_loras=1)
    blocked, other = world.add_all(1, 2, max_tokens=9)
    world.held[1, 0] = "being read"

    outputs = [world.step() for _ in range(3)]

    assert [output.running for output in outputs] == [[other]] * 3
    assert world.waited(blocked) == 0
