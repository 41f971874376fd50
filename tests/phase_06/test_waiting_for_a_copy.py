"""An adapter comes into its slot beside a step; the requests of that step do not wait for it (lab 6.2)."""

import pytest

from minivllm.core.output import ADAPTER_COPY, MAX_LORAS
from minivllm.observe.recorder import Skip
from tests.oracles.scheduler import World

pytestmark = pytest.mark.lab("6.2")


class CopyingWorld(World):
    """Copies what a step asks for once the step is through; `copies` counts, `broken` adapters never arrive."""

    def __init__(self, in_slots=(), broken=(), **options):
        super().__init__(**options)
        self.in_slots, self.broken, self.copies = set(in_slots), set(broken), []
        self.scheduler.can_prefetch = lambda adapter_id: adapter_id not in self.in_slots

    def step(self):
        output = super().step()
        self.copies += output.prefetch
        self.in_slots |= set(output.prefetch) - self.broken
        self.in_slots |= {request.adapter_id for request in output.running}
        return output


def ids(requests):
    return [request.request_id for request in requests]


def test_a_request_whose_adapter_must_be_copied_joins_one_step_later():
    world = CopyingWorld()
    world.add(0)
    world.step()
    newcomer = world.add(1)

    outputs = [world.step(), world.step()]

    assert outputs[0].skipped == [Skip(newcomer.request_id, 1, ADAPTER_COPY)]
    assert [output.prefetch for output in outputs] == [[1], []]
    assert newcomer.request_id not in ids(outputs[0].running)
    assert newcomer.request_id in ids(outputs[1].running)


def test_who_waits_for_a_copy_does_not_wait_for_a_slot():
    """It has one already: nobody is to lose a slot for it, and it has no place before those who have none."""
    world = CopyingWorld()
    world.add(0)
    world.step()
    newcomer = world.add(1)

    output = world.schedule()

    assert output.passed_over == {1: ADAPTER_COPY}
    assert not world.scheduler.waiting.is_passed_over(1), "its wait for a slot has begun, and it has a slot"
    world.finish_step(output)
    assert world.waited(newcomer) == 0


def test_nobody_is_held_back_while_nothing_runs():
    world = CopyingWorld()
    request = world.add(1)

    output = world.step()

    assert ids(output.running) == [request.request_id]
    assert output.prefetch == []


def test_an_adapter_in_its_slot_is_not_waited_for():
    world = CopyingWorld(in_slots={1})
    world.add(0)
    world.step()
    newcomer = world.add(1)

    assert newcomer.request_id in ids(world.step().running)


def test_requests_of_one_adapter_wait_for_one_copy():
    world = CopyingWorld(max_loras=2)
    world.add(0)
    world.step()
    newcomers = world.add_all(1, 1, 1)

    held, joined = world.step(), world.step()

    assert held.prefetch == [1]
    assert len(held.skipped) == 3
    assert set(ids(newcomers)) <= set(ids(joined.running))


def test_the_slot_is_kept_for_the_adapter_that_is_on_its_way():
    world = CopyingWorld(max_loras=1)
    world.add(0)
    world.step()
    first, second = world.add_all(1, 2)

    output = world.step()

    assert output.skipped == [Skip(first.request_id, 1, ADAPTER_COPY), Skip(second.request_id, 2, MAX_LORAS)]


def test_a_copy_that_never_arrives_holds_nobody_up_for_more_than_a_step():
    world = CopyingWorld(broken={1})
    world.add(0)
    world.step()
    newcomer = world.add(1)
    world.step()

    assert newcomer.request_id in ids(world.step().running)


def test_those_behind_who_waits_for_a_copy_are_admitted():
    world = CopyingWorld(in_slots={2})
    world.add(0)
    world.step()
    waits, *others = world.add_all(1, 2, 0)

    output = world.step()

    assert waits.request_id not in ids(output.running)
    assert ids(output.running)[1:] == ids(others)


def test_no_more_adapters_are_copied_than_there_are_slots_beside_the_running():
    world = CopyingWorld(max_loras=2, in_slots={1})
    world.add(1)
    world.step()
    world.add_all(2, 3, 4)

    assert world.step().prefetch == [2]
