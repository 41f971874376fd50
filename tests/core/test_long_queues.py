"""What a step looks at does not depend on how many wait, and its decisions are those of a walk past all of them."""

import random

import pytest
from test_scheduler_histories import disturb, random_request, random_world

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.output import ADAPTER_COPY, MAX_LORAS, NO_BLOCKS
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.lora.request import LoRARequest
from minivllm.observe.recorder import Skip, WatchedLine, skips
from minivllm.sampling_params import SamplingParams
from tests.oracles.scheduler import World
from tests.tools.nights import by_day

NUM_WAITING, NUM_ADAPTERS = 3_000, 300


class WatchedRequest(Request):
    """Notes who is looked at, whatever of it, while `seen` is a set."""

    seen = None

    def __getattribute__(self, name):
        if WatchedRequest.seen is not None:
            WatchedRequest.seen.add(id(self))
        return super().__getattribute__(name)


@pytest.fixture
def looked_at():
    """Call something; how many requests it looked at."""

    def watch(call, *arguments):
        WatchedRequest.seen = set()
        try:
            call(*arguments)
            return len(WatchedRequest.seen)
        finally:
            WatchedRequest.seen = None

    yield watch
    WatchedRequest.seen = None


def long_queue(num_adapters, num_waiting=NUM_WAITING, pinned=()):
    """Eight places and four slots, taken by requests that answer on and on; the others wait."""
    scheduler = Scheduler(
        SchedulerConfig(8, 64, 3),
        CacheConfig(num_blocks=200),
        LoRAConfig(max_loras=4),
        pinned_adapters=pinned,
        policy=WatchedLine(),
    )
    for number in range(num_waiting):
        adapter_id = number % num_adapters + 1 if num_adapters else 0
        lora_request = LoRARequest(f"a{adapter_id}", adapter_id, "/a") if num_adapters else None
        params = SamplingParams(max_tokens=100)
        scheduler.add_request(WatchedRequest(f"r{number}", [1, 2], params, lora_request))
    return scheduler


def step(scheduler):
    output = scheduler.schedule()
    output.skipped, output.num_skipped = skips(scheduler, output)
    scheduler.update_from_output(output, {s.request.request_id: [7] for s in output.scheduled if s.samples})
    return output


@pytest.mark.parametrize("num_adapters", by_day([2, 0, NUM_ADAPTERS, NUM_WAITING], 2))
def test_a_step_looks_at_those_it_computes_and_few_more(looked_at, num_adapters):
    scheduler = long_queue(num_adapters)
    step(scheduler)  # in it the waits of all these adapters begin

    seen = [looked_at(step, scheduler) for _ in range(12)]  # three turns

    assert max(seen) <= 120, f"3,000 wait, 8 have a place, 32 are named, and a step looked at {seen}"
    assert min(seen) >= 4, "the watch was to see something"


@pytest.mark.parametrize("num_adapters", [0, NUM_ADAPTERS])
def test_a_request_comes_and_goes_without_a_look_at_the_others(looked_at, num_adapters):
    scheduler = long_queue(num_adapters)
    step(scheduler)
    lora_request = LoRARequest("a7", 7, "/a") if num_adapters else None
    newcomer = WatchedRequest("new", [1], SamplingParams(), lora_request)

    came = looked_at(scheduler.add_request, newcomer)
    went = looked_at(scheduler.finish_requests, "r2000", RequestStatus.FINISHED_ABORTED)

    assert (came, went) == (1, 1)


def test_pins_under_a_long_queue_cost_a_look_at_those_who_are_refused_and_then_none(looked_at):
    scheduler = long_queue(NUM_ADAPTERS, pinned=[1, 2, 3, 4])

    refused = step(scheduler).refused
    seen = looked_at(step, scheduler)

    assert len(refused) == NUM_WAITING - 4 * NUM_WAITING // NUM_ADAPTERS
    assert len(scheduler.waiting) + len(scheduler.running) == 4 * NUM_WAITING // NUM_ADAPTERS
    assert seen <= 120


def test_a_step_counts_all_it_passes_over_and_names_the_first():
    scheduler = long_queue(NUM_ADAPTERS)
    first = step(scheduler)

    second = step(scheduler)

    # Adapters 1 to 4 have the slots, and two of the places each: the second of each came 300 later.
    served = [*range(4), *range(NUM_ADAPTERS, NUM_ADAPTERS + 4)]
    assert [r.request_id for r in second.running] == [f"r{number}" for number in served]
    assert first.num_skipped == NUM_ADAPTERS + 3 - 7, "when the last place was taken, so many had been asked"
    assert first.skipped == [Skip(f"r{i}", i + 1, MAX_LORAS) for i in range(4, 36)]
    assert (second.num_skipped, second.skipped) == (0, []), "the step was full before anybody was asked"


class WalkingScheduler(Scheduler):
    """Asks everybody who waits, one after the other, as the rule says it; `walked` names those it passed over."""

    def schedule(self):
        self.walked = []
        return super().schedule()

    def _schedule_waiting(self, output):
        waiting = list(self.waiting)
        oldest = {}
        for request in waiting:
            if self.waiting.is_passed_over(request.adapter_id):
                oldest.setdefault(request.adapter_id, request)
        ahead = sorted(oldest.values(), key=lambda r: -self.lora.waited(r.adapter_id))
        for request in ahead + [r for r in waiting if oldest.get(r.adapter_id) is not r]:
            output.halted_by = self._full(output)
            if output.halted_by:
                return
            reason = self.why_wait(request)
            if reason is None and not self.lora.fits(request.adapter_id):
                self.lora.pass_over(request.adapter_id)
                reason = MAX_LORAS
            if reason is None and self._prefetches(request.adapter_id, output):
                reason = ADAPTER_COPY
            if reason is not None:
                self.walked.append(Skip(request.request_id, request.adapter_id, reason))
            elif not self._admit(request, output):
                output.halted_by = NO_BLOCKS
                return


def told(scheduler, output):
    """A step in plain words, and the state it leaves."""
    return {
        "scheduled": [(s.request.request_id, s.num_new_tokens, s.samples) for s in output.scheduled],
        "running": [request.request_id for request in output.running],
        "preempted": (output.preempted, output.preempted_adapters),
        "refused": [request.request_id for request in output.refused],
        "prefetch": output.prefetch,
        "halted_by": output.halted_by,
        "waiting": [(r.request_id, scheduler.waiting.wait_steps(r)) for r in scheduler.waiting],
    }


@pytest.mark.parametrize("seed", by_day(range(40)))
def test_every_decision_is_that_of_a_walk_past_all_who_wait(seed, monkeypatch):
    """Two worlds with one history, one of which walks. Many adapters, so that most of them wait."""
    monkeypatch.setattr("test_scheduler_histories.NUM_ADAPTERS", [3, 12, 40][seed % 3])
    rngs = random.Random(seed), random.Random(seed)
    worlds = [random_world(rng) for rng in rngs]
    worlds[1].scheduler.__class__ = WalkingScheduler
    prompts = [[[rng.randrange(3) for _ in range(24)] for _ in range(2)] for rng in rngs]

    for number in range(80):
        outputs = []
        for world, rng, texts in zip(worlds, rngs, prompts):
            for _ in range(rng.choice([0, 1, 3, 8]) if number < 50 else 0):
                random_request(world, rng, texts)
            if rng.random() < 0.3:
                world.check_output = lambda *_: None
                disturb(world, rng)
                del world.check_output
            outputs.append(world.schedule() if world is worlds[0] else world.scheduler.schedule())
        fast, slow = (world.scheduler for world in worlds)
        assert told(fast, outputs[0]) == told(slow, outputs[1])
        if outputs[0].halted_by is None or outputs[0].num_skipped:
            assert sorted(outputs[0].skipped) == sorted(slow.walked), f"step {number}"
        for world, output in zip(worlds, outputs):
            world._reload_what_is_drained()
            world.finish_step(output)


def test_who_waits_for_many_adapters_is_served_in_the_end():
    world = World(max_loras=3, max_lora_wait_steps=2, max_num_seqs=6)
    requests = world.add_all(*(number % 100 for number in range(300)), max_tokens=2)

    world.run()

    assert all(request.output_token_ids == world.expected_tokens(request) for request in requests)


@pytest.mark.parametrize("seed", range(4))
def test_a_wait_is_counted_by_the_step_though_nobody_counts_it_up(seed):
    rng = random.Random(seed)
    world = World(max_loras=2, max_lora_wait_steps=3, max_num_seqs=4)
    expected = {}

    for _ in range(120):
        for _ in range(rng.choice([0, 0, 1, 2])):
            expected[world.add(rng.randrange(6), max_tokens=rng.randint(3, 25))] = 0
        if rng.random() < 0.1 and world.scheduler.requests:
            world.abort(rng.choice(list(world.scheduler.requests.values())))
        world.step()
        for request in world.scheduler.waiting:
            expected[request] += world.scheduler.waiting.is_passed_over(request.adapter_id)

        assert {r: world.waited(r) for r in expected} == expected
    assert any(r.num_preemptions and r.lora_wait_steps > 3 for r in expected), "two waits of one request"


def test_an_adapter_for_whom_nobody_waits_any_more_does_not_wait():
    world = World(max_loras=1, max_lora_wait_steps=50)
    world.add(1, max_tokens=30)
    gone, back = world.add_all(2, 3)
    world.step()

    world.abort(gone)
    world.abort(back)
    world.add(3)
    world.step()
    world.add(2)

    waiting = world.scheduler.waiting
    assert not waiting.is_passed_over(2), "its last request went, and a step later so had its wait"
    assert waiting.waited(3) == 2, "its next request was there before the step ended"


def test_nothing_is_kept_of_adapters_that_waited():
    world = World(max_loras=2, max_lora_wait_steps=3)
    world.add_all(*range(40), max_tokens=2)
    for request in world.add_all(50, 51, 52):
        world.abort(request)
    world.run()

    world.step()

    assert not world.scheduler.waiting._of_adapter
    assert not world.scheduler.in_flight
