"""With the slots full, nobody waits without end (lab 6.4; incident 10). Time is counted in steps.

The streams below keep the slots busy for ever: as one request ends, the next of the same adapter is there.
"""

import random

import pytest

from minivllm.core.lora_admission import LoRAAdmission
from minivllm.core.output import NO_BLOCKS
from minivllm.core.request import Request
from minivllm.core.request_queue import WaitingQueue
from minivllm.sampling_params import SamplingParams
from tests.oracles.scheduler import World, lora

pytestmark = pytest.mark.lab("6.4")


def test_a_step_that_begins_moves_no_clock():
    """How long an adapter has had its slot counts over many steps: who forgets it never ends a turn."""
    admission = LoRAAdmission(max_loras=2, max_wait_steps=8)
    admission.begin_step(running=[3], pinned=[])
    for _ in range(2):
        admission.end_step(ran=[3], sampled={3})

    admission.begin_step(running=[3], pinned=[])

    assert admission.held == {3: 2}, (
        "adapter 3 has had its slot for two steps, and none has been computed since"
    )


# In the order of the queue the adapters that wait; slots, who runs, who is pinned, and the clocks; then who makes
# way, and who has a slot or one kept.
RULES = {
    "not due the moment it is passed over": ([2], 1, [1], [], {2: 0}, {1: 9}, [], {1}),
    "not due a step before the bound": ([2], 1, [1], [], {2: 2}, {1: 9}, [], {1}),
    "due at the bound": ([2], 1, [1], [], {2: 3}, {1: 9}, [1], {2}),
    "due after the bound": ([2], 1, [1], [], {2: 4}, {1: 9}, [1], {2}),
    "who has just got its slot keeps it": ([2], 1, [1], [], {2: 9}, {1: 0}, [], {1}),
    "it keeps it for a turn": ([2], 1, [1], [], {2: 9}, {1: 2}, [], {1}),
    "it makes way after a turn": ([2], 1, [1], [], {2: 9}, {1: 3}, [1], {2}),
    "a free slot is kept, and costs nobody one": ([2], 2, [1], [], {2: 9}, {1: 9}, [], {1, 2}),
    "two that are due need two slots": (
        [3, 4],
        2,
        [1, 2],
        [],
        {3: 9, 4: 9},
        {1: 8, 2: 9},
        [2, 1],
        {3, 4},
    ),
    "the longest wait comes first": ([2, 3, 4], 1, [1], [], {2: 4, 3: 6, 4: 5}, {1: 9}, [1], {3}),
    "never passed over, never due": ([2], 1, [1], [], {}, {1: 9}, [], {1}),
    "due twice in the queue, it takes one": ([3, 3], 2, [1, 2], [], {3: 9}, {1: 9, 2: 9}, [1], {2, 3}),
    "due, and pinned: it has a slot already": ([2], 2, [1], [2], {2: 9}, {1: 9}, [], {1, 2}),
    "nobody makes way for base": ([0, 0], 1, [1], [], {}, {1: 9}, [], {1}),
    "a pin takes its slot at once": ([], 1, [1], [2], {}, {1: 0}, [1], {2}),
    "whoever had it for how long": ([], 1, [1], [2], {}, {1: 9}, [1], {2}),
    "two pins take two": ([], 2, [1, 2], [3, 4], {}, {1: 5}, [1, 2], {3, 4}),
    "a pin where there is room costs nobody one": ([], 2, [1], [2], {}, {1: 9}, [], {1, 2}),
}


class TestMakeRoom:
    """The rule itself, on clocks set by hand: `waited` and `held`, in steps; max_wait_steps is 3."""

    def make_room(self, waiting, max_loras, running, pinned, waited, held):
        """waiting: the adapter of each request in the queue; waited: adapter -> steps since it was passed over"""
        queue = WaitingQueue()
        for arrival, adapter_id in enumerate(waiting):
            request = Request(f"r{arrival}", [1], SamplingParams(), lora(adapter_id))
            request.arrival_order = arrival
            queue.add(request)
        for adapter_id, steps in waited.items():
            queue.step = 100 - steps
            queue.pass_over(adapter_id)
        queue.step = 100
        admission = LoRAAdmission(max_loras, 3, queue)
        admission.held = dict(held)
        admission.begin_step(running, pinned)
        return admission, admission.make_room(queue.longest_wait_first())

    @pytest.mark.parametrize("case", RULES)
    def test_makes_way(self, case):
        waiting, max_loras, running, pinned, waited, held, evicted, taken = RULES[case]

        admission, made_way = self.make_room(waiting, max_loras, running, pinned, waited, held)

        told = f"{running} run, for {held} steps, {pinned} are pinned; {waiting} wait, for {waited}; {max_loras} slots"
        assert made_way == evicted, f"{told}: who makes way"
        assert admission.taken == taken, f"{told}: who has a slot, or one that is kept for it"

    def test_nobody_behind_the_first_who_is_not_due_is_looked_at(self):
        """Thousands may wait, and none of them costs a step anything."""
        admission, looked_at = LoRAAdmission(1, 3), []
        admission.begin_step([1], [])

        admission.make_room(looked_at.append(a) or a for a in range(2, 5000))

        assert looked_at == [2], "adapter 2 is not due, and those behind it have waited less"


def keep_busy(world, *adapter_ids, max_tokens=3):
    """Before each step: make sure that somebody waits behind those who run."""
    waiting = {r.adapter_id for r in world.scheduler.waiting}
    world.add_all(*(a for a in adapter_ids if a not in waiting), max_tokens=max_tokens)


def steps_until_running(world, request, *stream, limit=100):
    for step in range(limit):
        keep_busy(world, *stream)
        if request in world.step().running:
            return step
    raise AssertionError(f"{request.request_id} starved for {limit} steps")


@pytest.mark.parametrize("max_wait", [1, 2, 7, 20])
@pytest.mark.parametrize("max_loras", [1, 2, 3])
def test_a_waiter_is_served_after_the_bound_whatever_keeps_coming(max_loras, max_wait):
    stream = range(1, max_loras + 1)
    world = World(max_loras=max_loras, max_lora_wait_steps=max_wait, max_num_seqs=64)
    for _ in range(max_wait + 3):
        keep_busy(world, *stream)
        world.step()
    waiter = world.add(99)

    waited = steps_until_running(world, waiter, *stream)

    assert waited == max_wait, f"{waiter} had its slot after {waited} steps; the bound is {max_wait}"
    assert world.waited(waiter) == max_wait


def test_a_waiter_is_served_after_the_bound_when_the_others_never_end():
    world = World(max_loras=2, max_lora_wait_steps=5)
    world.add_all(1, 2, max_tokens=400)
    for _ in range(6):
        world.step()
    waiter = world.add(3)

    waited = steps_until_running(world, waiter)

    assert waited == 5


@pytest.mark.parametrize(
    ("running", "max_loras", "pinned", "makes_way"),
    [
        pytest.param([1, 2, 1, 1, 2], 2, set(), 2, id="the one with the fewest running requests"),
        pytest.param([1, 1, 1, 2], 2, {2}, 1, id="never a pinned one"),
        pytest.param([0, 1, 1], 1, set(), 1, id="never base"),
    ],
)
def test_once_somebody_is_due_makes_way(running, max_loras, pinned, makes_way):
    world = World(max_loras=max_loras, max_lora_wait_steps=4)
    world.pinned = pinned
    requests = world.add_all(*running, max_tokens=50)
    waiter = world.add(3)

    outputs = [world.step() for _ in range(6)]

    assert [o.preempted_adapters for o in outputs] == [[], [], [], [], [makes_way], []]
    stay = [request for request in requests if request.adapter_id != makes_way]
    assert {waiter, *stay} == set(outputs[4].running)


def test_newcomers_of_the_adapter_that_made_way_do_not_overtake_the_waiter():
    world = World(max_loras=1, max_lora_wait_steps=3)
    world.add(1, max_tokens=50)
    for _ in range(4):
        world.step()
    waiter = world.add(2, max_tokens=8)

    for _ in range(3):
        world.add(1)
        world.step()
    world.add(1)
    output = world.step()

    assert output.running == [waiter]


def test_the_freed_slot_is_kept_for_the_waiter_until_its_blocks_are_free():
    """Its prompt lacks blocks for now; whoever else could use the slot must not have it."""
    world = World(max_loras=2, max_lora_wait_steps=10, block_size=4, num_blocks=16)
    world.add(1, prompt=range(20), max_tokens=16)
    world.add_all(1, 2, prompt=[1], max_tokens=14)
    waiter = world.add(3, prompt=[6] * 30, max_tokens=1)
    outputs = [world.step() for _ in range(11)]
    assert outputs[-1].preempted_adapters == [2]
    assert outputs[-1].halted_by == NO_BLOCKS

    while waiter not in outputs[-1].running:
        keep_busy(world, 2, 4)
        outputs.append(world.step())

    assert len(outputs) > 14, "the waiter was to lack blocks for some steps"
    assert {r.adapter_id for o in outputs[10:-1] for r in o.running} == {1}


def test_those_who_wait_longest_are_served_first():
    world = World(max_loras=1, max_lora_wait_steps=4)
    world.add(1, max_tokens=100)
    world.step()
    first = world.add(2, max_tokens=100)
    world.step()
    second = world.add(3, max_tokens=100)

    order = []
    for _ in range(30):
        for request in world.step().running:
            if request not in order:
                order.append(request)

    assert order[1:] == [first, second]


def test_a_slot_that_comes_free_goes_to_who_was_passed_over_not_to_who_was_preempted():
    """A preempted request goes back to its place by arrival, yet another adapter has waited longer."""
    world = World(max_loras=2, max_lora_wait_steps=5)
    preempted, *ending = world.add_all(1, 2, 2, max_tokens=9)
    world.step()
    due = world.add(3, max_tokens=50)
    for _ in range(4):
        world.step()
    passed_over = world.add(4, max_tokens=50)
    world.step()
    assert world.step().preempted_adapters == [1]
    while not all(request.is_finished for request in ending):
        world.step()

    output = world.step()

    assert output.preempted_adapters == []
    assert output.running == [due, passed_over]
    assert preempted in world.scheduler.waiting


def test_an_adapter_keeps_its_slot_for_a_turn_before_it_makes_way():
    """No ping-pong: three adapters with endless work share two slots in turns, not by the step."""
    world = World(max_loras=2, max_lora_wait_steps=10)
    world.add_all(1, 2, 3, max_tokens=300)

    outputs = [world.step() for _ in range(300)]

    evictions = [o.preempted_adapters for o in outputs if o.preempted_adapters]
    assert sum(map(len, evictions)) <= 2 * 300 / 10 + 2
    turns = {adapter_id: sum(adapter_id in e for e in evictions) for adapter_id in (1, 2, 3)}
    assert max(turns.values()) - min(turns.values()) <= 1


def test_a_turn_lasts_until_it_brought_tokens():
    """A prompt that takes longer than the bound must not be thrown away chunk by chunk for ever."""
    world = World(max_loras=1, max_lora_wait_steps=2, max_num_batched_tokens=4, enable_prefix_caching=False)
    requests = [world.add(a, prompt=range(a, a + 40), max_tokens=6) for a in (1, 2, 3)]

    world.run()

    assert all(r.output_token_ids == world.expected_tokens(r) for r in requests)


@pytest.mark.parametrize("seed", range(8))
def test_nobody_starves_under_constant_arrivals_of_more_adapters_than_slots(seed):
    """A virtual clock over random streams: from being passed over to having a slot, no adapter waits longer
    than all others' turns take; and there are no more evictions than turns."""
    rng = random.Random(seed)
    num_adapters, max_loras, max_wait = rng.randint(3, 7), rng.randint(1, 3), rng.randint(2, 9)
    world = World(
        max_loras=max_loras, max_lora_wait_steps=max_wait, max_num_seqs=6, max_num_batched_tokens=16
    )
    chunks = 2
    bound = (max_wait + 1) + -(-num_adapters // max_loras) * (max_wait + chunks)
    since, num_evictions, num_steps = {}, 0, 250
    for step in range(num_steps):
        for _ in range(rng.choice([0, 0, 1, 2])):
            world.add(
                rng.randrange(num_adapters + 1), [rng.randrange(5)] * rng.randint(1, 6), rng.randint(1, 25)
            )
        output = world.step()
        num_evictions += len(output.preempted_adapters)
        running = {r.adapter_id for r in output.running}
        for adapter_id in {s.adapter_id for s in output.skipped} | set(output.preempted_adapters):
            since.setdefault(adapter_id, step)
        waiting = {r.adapter_id for r in world.scheduler.waiting}
        since = {a: t for a, t in since.items() if a in waiting - running}
        for adapter_id, first in since.items():
            assert step - first <= bound, (
                f"adapter {adapter_id} waits since step {first}; this is step {step}, the bound {bound} steps "
                f"({num_adapters} adapters, max_loras {max_loras}, max_lora_wait_steps {max_wait})"
            )

    most = max_loras * (num_steps / max_wait + 1)
    assert num_evictions <= most, (
        f"{num_evictions} evictions in {num_steps} steps; turns of {max_wait} steps allow for {most:.0f}"
    )
    world.run()


def test_adapters_with_one_token_answers_do_not_stay_ahead_in_line():
    """Served and finished within a step, an adapter has had its slot: its wait begins anew."""
    world = World(max_loras=1, max_lora_wait_steps=3, max_num_seqs=2)
    for _ in range(6):
        world.add_all(1, 2, 1, 2, max_tokens=1)
        world.step()
    waiter = world.add(3)

    for _ in range(8):
        world.add_all(1, 2, 1, 2, max_tokens=1)
        world.step()

    # Two requests a step, 24 of them before it.
    assert waiter.num_output_tokens > 0


def test_an_adapter_whose_turn_it_is_lets_one_request_go_first_not_all():
    """Or base requests would starve between adapters that take turns and always fill the batch."""
    world = World(max_loras=1, max_lora_wait_steps=3, max_num_seqs=3)
    _, _, due, _ = world.add_all(1, 1, 2, 1, max_tokens=50)
    world.step()
    base, next_of_two, _ = world.add_all(0, 2, 2, max_tokens=50)
    world.step()
    world.step()

    output = world.step()

    assert output.preempted_adapters == [1]
    assert output.running == [due, base, next_of_two]


def test_a_pin_under_running_requests_makes_the_smallest_adapter_give_way():
    """Incident 3, the other way round: the pin comes in while every slot is taken."""
    world = World(max_loras=2)
    world.add_all(1, 1, 2, max_tokens=9)
    world.step()
    world.pinned = {3}

    output = world.step()

    assert output.preempted_adapters == [2]
    assert {r.adapter_id for r in output.running} == {1}


def test_nobody_makes_way_for_requests_that_may_not_run_yet():
    world = World(max_loras=1, max_lora_wait_steps=3)
    world.add_all(1, 2, max_tokens=50)
    world.step()
    world.held[2, 0] = "being read"

    evictions = [world.step().preempted_adapters for _ in range(9)]
    del world.held[2, 0]

    assert not any(evictions)
    assert world.step().preempted_adapters == [1]
