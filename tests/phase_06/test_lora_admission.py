"""Which adapters may run together (lab 6.1), against brute force over slots and over subsets of the queue."""

from itertools import combinations, product

import pytest

from minivllm.core.lora_admission import LoRAAdmission
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


def test_counting_sees_every_running_adapter_and_every_pin():
    admission = LoRAAdmission(max_loras=4, max_wait_steps=8)

    admission.begin_step(running=[0, 5, 0, 2, 5], pinned=[7, 2])

    assert admission.taken == {2, 5, 7}
    assert admission.pinned == {2, 7}
    assert dict(admission.num_running) == {5: 2, 2: 1}, "requests of each adapter that run, base left out"


def test_who_joins_has_a_slot_from_then_on():
    admission = LoRAAdmission(max_loras=2, max_wait_steps=8)
    admission.begin_step(running=[5], pinned=[])

    admission.take(0)
    admission.take(7)

    assert admission.taken == {5, 7}, "7 has joined; base takes no slot"
    assert dict(admission.num_running) == {5: 1}, (
        "7 is about to run: that is counted when the next step begins"
    )
    assert (admission.pinned, admission.fits(8), admission.fits(0)) == (set(), False, True)


def test_the_pins_of_a_step_do_not_change_with_those_who_pin():
    admission, pinned = LoRAAdmission(max_loras=2, max_wait_steps=8), {7}
    admission.begin_step(running=[5], pinned=pinned)

    pinned.add(8)
    admission.take(5)

    assert (admission.pinned, pinned) == ({7}, {7, 8})


def test_the_count_starts_afresh_at_every_step():
    admission = LoRAAdmission(max_loras=1, max_wait_steps=8)
    admission.begin_step(running=[3], pinned=[])

    admission.begin_step(running=[0], pinned=[])

    assert admission.fits(4), "no request of adapter 3 runs any more, and still it has the only slot"


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


def test_a_request_that_must_wait_for_others_to_end_is_not_refused():
    admission = LoRAAdmission(max_loras=2, max_wait_steps=8)

    admission.begin_step(running=[1, 2], pinned=[1])

    assert not admission.fits(3)
    assert not admission.never_fits(3), "adapter 2 is not pinned: its slot comes free when its requests end"


def test_a_request_is_refused_exactly_when_the_pins_leave_no_slot_for_its_adapter():
    for max_loras in (1, 2, 3):
        for running, pinned in product(((), (2,), (0, 1, 5)), subsets((1, 3, 4))):
            if len(pinned) > max_loras:
                continue
            admission = LoRAAdmission(max_loras, max_wait_steps=8)
            admission.begin_step(running, pinned)

            for adapter_id in range(6):
                is_refused = not can_place({*pinned, adapter_id}, max_loras)
                assert admission.never_fits(adapter_id) is is_refused, (
                    f"never_fits({adapter_id}) is {admission.never_fits(adapter_id)} with max_loras {max_loras}, "
                    f"requests of {running} running and {pinned or 'nobody'} pinned"
                )


def test_a_request_fits_exactly_when_its_adapter_can_be_given_a_slot():
    for max_loras in (1, 2, 3):
        for running in product((0, 1, 2, 3), repeat=3):
            for pinned in subsets((1, 3, 4)):
                if not can_place({*running, *pinned}, max_loras):
                    continue
                admission = LoRAAdmission(max_loras, max_wait_steps=8)
                admission.begin_step(running, pinned)

                for adapter_id in range(6):
                    assert admission.fits(adapter_id) == can_place(
                        {*running, *pinned, adapter_id}, max_loras
                    ), (
                        f"fits({adapter_id}) is {admission.fits(adapter_id)} with max_loras {max_loras}, "
                        f"requests of {running} running and {pinned or 'nobody'} pinned"
                    )


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
