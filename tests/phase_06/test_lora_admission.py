"""Which adapters may run together (lab 6.1), against brute force over slots and over subsets of the queue."""

import random
from collections import Counter
from itertools import combinations, product

import pytest

from minivllm.core.lora_admission import LoRASlots
from minivllm.core.output import MAX_LORAS
from tests.oracles.scheduler import World

pytestmark = pytest.mark.lab("6.1")


def can_place(adapter_ids, num_slots):
    """Brute force: try every way of giving each adapter (base aside) a slot of its own."""
    adapters = sorted(set(adapter_ids) - {0})
    return any(len(set(slots)) == len(adapters) for slots in product(range(num_slots), repeat=len(adapters)))


def subsets(items):
    return (set(chosen) for size in range(len(items) + 1) for chosen in combinations(items, size))


def adapters(requests):
    return [request.adapter_id for request in requests]


def test_requests_of_one_adapter_share_its_slot():
    world = World(max_loras=1)
    world.add_all(5, 5, 5)

    output = world.step()

    assert adapters(output.running) == [5, 5, 5]


def test_base_requests_need_no_slot():
    """Incident 16: as many adapters as slots, and base requests among them."""
    world = World(max_loras=2)
    world.add_all(1, 0, 2, 0)

    output = world.step()

    assert adapters(output.running) == [1, 0, 2, 0]
    assert output.skipped == []


def test_base_requests_take_no_slot_from_adapters_that_come_later():
    world = World(max_loras=1)
    world.add_all(0, 0)
    world.step()
    world.add(7)

    output = world.step()

    assert adapters(output.running) == [0, 0, 7]


def test_a_pinned_adapter_takes_a_slot_even_when_no_request_uses_it():
    """Incident 3: max_loras=2, one pinned, requests for two others."""
    world = World(max_loras=2)
    world.pinned = {9}
    world.add_all(1, 2)

    output = world.step()

    assert adapters(output.running) == [1]
    assert [(s.adapter_id, s.reason) for s in output.skipped] == [(2, MAX_LORAS)]


def test_a_pinned_adapter_that_runs_is_counted_once():
    world = World(max_loras=2)
    world.pinned = {1}
    world.add(1)
    world.step()
    world.add(2)

    output = world.step()

    assert adapters(output.running) == [1, 2]


def test_a_running_request_without_tokens_in_this_step_keeps_its_slot():
    """Incident 19: only requests scheduled in this step were counted."""
    world = World(max_loras=2, max_num_batched_tokens=2)
    one, two = world.add_all(1, 2, max_tokens=9)
    world.step(tokens_each=2)
    output = world.step(tokens_each=2)
    assert [s.request for s in output.scheduled] == [one]
    assert output.running == [one, two]
    world.pinned = {3}

    output = world.schedule()

    assert len({r.adapter_id for r in output.running} | world.pinned) == 2
    assert len(output.preempted_adapters) == 1


def slots_with(max_loras, running=(), pinned=()):
    slots = LoRASlots(max_loras)
    slots.begin_step(running=list(running), pinned=list(pinned))
    return slots


def test_before_the_first_step_nobody_has_a_slot():
    slots = LoRASlots(2)

    assert (set(slots.holders()), dict(slots.evictable())) == (set(), {})
    assert [slots.fits(adapter_id) for adapter_id in (0, 1)] == [True, True]
    assert [slots.never_fits(adapter_id) for adapter_id in (0, 1)] == [False, False]


# Slots, who runs and who is pinned when a step begins, who joins (+) and makes way (-) in it; then who has a slot, and
# of whom how many requests run that may make way.
COUNTED = {
    "every running adapter and every pin": (4, [0, 5, 0, 2, 5], [7, 2], "", {2, 5, 7}, {5: 2}),
    "who joins, though base takes no slot": (2, [5], [], "+0 +7", {5, 7}, {5: 1}),
    "another request of who runs, before the next step": (2, [5], [], "+5", {5}, {5: 1}),
    "who makes way has no slot and no requests": (2, [5, 6, 5], [6], "+5 -5", {6}, {}),
    "the slot of who makes way is taken in the same step": (1, [5], [], "-5 +8", {8}, {}),
    "pins that come in under running requests": (2, [1, 2], [3, 4], "", {1, 2, 3, 4}, {1: 1, 2: 1}),
    "those make way for pins": (2, [1, 2], [3, 4], "-1 -2", {3, 4}, {}),
}


@pytest.mark.parametrize("case", COUNTED)
def test_who_has_a_slot(case):
    max_loras, running, pinned, calls, holders, evictable = COUNTED[case]
    slots = slots_with(max_loras, running, pinned)

    for call in calls.split():
        (slots.take if call[0] == "+" else slots.lose)(int(call[1:]))

    assert set(slots.holders()) == holders, "who has a slot"
    assert dict(slots.evictable()) == evictable, "how many requests run, of adapters that are not pinned"
    fits = {adapter_id for adapter_id in range(9) if slots.fits(adapter_id)}
    assert fits == (set(range(9)) if len(holders) < max_loras else {0, *holders}), "who may have a slot"


def test_a_step_may_be_given_what_can_be_read_once():
    slots = LoRASlots(3)

    slots.begin_step(running=iter([4, 0, 4]), pinned=iter([6]))

    assert (set(slots.holders()), dict(slots.evictable())) == ({4, 6}, {4: 2})


def test_asking_takes_nothing():
    slots = slots_with(2, running=[5])

    assert slots.fits(7)

    assert set(slots.holders()) == {5}, "7 was asked about, and has not joined: it may lack blocks"
    assert slots.fits(8), "the second slot is still free"


def test_the_pins_of_a_step_do_not_change_with_those_who_pin():
    slots, pinned, running = LoRASlots(3), {7}, [5]
    slots.begin_step(running=running, pinned=pinned)

    pinned.add(8)
    running.append(9)
    slots.take(5)

    assert (set(slots.holders()), dict(slots.evictable())) == ({5, 7}, {5: 1})
    assert pinned == {7, 8}, "the set is the caller's"


def test_what_is_told_can_be_changed_and_changes_nothing():
    slots = slots_with(2, running=[5, 6])

    told = slots.holders(), slots.evictable()
    slots.lose(5)

    assert (set(told[0]), dict(told[1])) == ({5, 6}, {5: 1, 6: 1}), "it says what was when it was asked"
    assert set(slots.holders()) == {6}


def test_the_count_starts_afresh_at_every_step():
    slots = slots_with(1, running=[3])
    slots.take(3)

    slots.begin_step(running=[0], pinned=[])

    assert slots.fits(4), "no request of adapter 3 runs any more, and still it has the only slot"
    assert dict(slots.evictable()) == {}


def test_what_lasts_does_not_change_with_who_joins():
    slots = slots_with(2, pinned=[1])

    slots.take(2)

    assert [slots.never_fits(adapter_id) for adapter_id in (0, 1, 2, 3)] == [False] * 4


def test_a_request_is_refused_exactly_when_the_pins_leave_no_slot_for_its_adapter():
    for max_loras in (1, 2, 3):
        for running, pinned in product(((), (2,), (0, 1, 5)), subsets((1, 3, 4))):
            if len(pinned) > max_loras:
                continue
            slots = slots_with(max_loras, running, pinned)

            for adapter_id in range(6):
                is_refused = not can_place({*pinned, adapter_id}, max_loras)
                assert slots.never_fits(adapter_id) is is_refused, (
                    f"never_fits({adapter_id}) is {slots.never_fits(adapter_id)} with max_loras {max_loras}, "
                    f"requests of {running} running and {pinned or 'nobody'} pinned"
                )


def test_a_request_fits_exactly_when_its_adapter_can_be_given_a_slot():
    for max_loras in (1, 2, 3):
        for running in product((0, 1, 2, 3), repeat=3):
            for pinned in subsets((1, 3, 4)):
                if not can_place({*running, *pinned}, max_loras):
                    continue
                slots = slots_with(max_loras, running, pinned)

                for adapter_id in range(6):
                    assert slots.fits(adapter_id) == can_place({*running, *pinned, adapter_id}, max_loras), (
                        f"fits({adapter_id}) is {slots.fits(adapter_id)} with max_loras {max_loras}, "
                        f"requests of {running} running and {pinned or 'nobody'} pinned"
                    )


def test_steps_of_every_kind_agree_with_a_list_of_all_that_happened():
    """Nothing is kept up to date here: each answer is found in the step's own history, read from its beginning."""
    choose = random.Random(6)
    for max_loras in (1, 2, 3, 4):
        slots = LoRASlots(max_loras)
        for _ in range(150):
            running = choose.choices(range(7), k=choose.randrange(6))
            pinned = choose.sample(range(1, 7), k=choose.randrange(max_loras + 1))
            slots.begin_step(running, pinned)
            history = [("pin", a) for a in pinned] + [("run", a) for a in running if a]
            for _ in range(choose.randrange(7)):
                adapter_id = choose.randrange(7)
                can_lose = sorted({a for what, a in history if what == "run"} - set(pinned))
                if can_lose and choose.random() < 0.4:
                    victim = choose.choice(can_lose)
                    slots.lose(victim)
                    history = [entry for entry in history if entry[1] != victim]
                elif slots.fits(adapter_id):
                    slots.take(adapter_id)
                    history += [("take", adapter_id)] if adapter_id else []

                has_slot = {a for _, a in history}
                runs = Counter(a for what, a in history if what == "run" and a not in pinned)
                assert (set(slots.holders()), dict(slots.evictable())) == (has_slot, dict(runs)), history
                for asked in range(7):
                    is_free = asked == 0 or asked in has_slot or max_loras > len(has_slot)
                    assert slots.fits(asked) is is_free, f"{asked} of {max_loras}: {history}"


def test_the_first_batch_is_the_first_in_line_of_all_batches_that_can_be_placed():
    """Of all subsets of the queue that can be placed, the one that prefers whoever came first."""
    for max_loras, max_num_seqs, pinned in product((1, 2), (2, 4), ((), (1,), (3,))):
        for adapter_ids in product((0, 1, 2, 3), repeat=4):
            if len(pinned) == max_loras:
                adapter_ids = tuple(a if a in (0, *pinned) else 0 for a in adapter_ids)
            world = World(max_loras=max_loras, max_num_seqs=max_num_seqs, num_blocks=20)
            world.pinned = set(pinned)
            requests = world.add_all(*adapter_ids)

            output = world.schedule()

            placeable = [
                chosen
                for chosen in product((True, False), repeat=4)
                if sum(chosen) <= max_num_seqs
                and can_place({*pinned, *(a for a, taken in zip(adapter_ids, chosen) if taken)}, max_loras)
            ]
            expected = [request for request, taken in zip(requests, max(placeable)) if taken]
            assert output.running == expected, (
                f"max_loras {max_loras}, pinned {pinned}: of {requests}\n"
                f"admitted {output.running}\nexpected {expected}"
            )
