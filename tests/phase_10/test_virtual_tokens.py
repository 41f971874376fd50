"""A virtual token counter (lab 10.3). The oracles: the paper's algorithm taken literally, and the paper's bound."""

import itertools

import numpy as np
import pytest
from fleets import config, fleet

from minivllm.config import CacheConfig, LoRAConfig, SchedulerConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.lora.request import LoRARequest
from minivllm.policies.fairness import VirtualTokenCounter
from minivllm.sampling_params import SamplingParams
from minivllm.simulate.traffic import Arrival

pytestmark = pytest.mark.lab("10.3")


class World:
    """A real scheduler, of which the test says who joins and what is answered. Its policy is asked step by step."""

    def __init__(self, policy):
        self.policy, self.orders = policy, itertools.count()
        self.scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=400), LoRAConfig(max_loras=8))

    def come(self, adapter_id, prompt=1):
        lora = LoRARequest(f"adapter{adapter_id}", adapter_id, f"/{adapter_id}") if adapter_id else None
        name = f"request {next(self.orders)} of adapter {adapter_id}"
        request = Request(name, [1] * prompt, SamplingParams(max_tokens=100, ignore_eos=True), lora)
        self.scheduler.add_request(request)
        request.num_cached_tokens = prompt // 2
        return request

    def answer(self, request, num_output_tokens):
        """It has so many tokens of its answer by now."""
        for _ in range(num_output_tokens - request.num_output_tokens):
            request.append_output_token(1)

    def finish(self, request):
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_STOPPED)

    def preempt(self, request):
        self.scheduler._preempt(request, SchedulerOutput())

    def step(self, places=0, may_join=lambda request: True):
        """Ask until so many have joined. Returns who was asked, and who joined."""
        asked, joined = [], []
        for request in self.policy(self.scheduler, SchedulerOutput()):
            if len(joined) == places:
                break
            asked.append(request)
            if may_join(request):
                self.scheduler.waiting.remove(request, joins=True)
                self.scheduler.running.append(request)
                request.status = RequestStatus.RUNNING
                joined.append(request)
        return asked, joined

    @property
    def counters(self):
        return self.policy.counters


@pytest.fixture
def world():
    return World(VirtualTokenCounter(prompt_weight=1.0, answer_weight=2.0))


class TestWhoWasServedLeast:
    @pytest.mark.parametrize(
        ("came", "joined", "counters"),
        [
            # All begin at 0; then 1 has 30, 2 has 10 and 3 has 25. So 2 comes again, and with 20 it is before 3.
            ([(1, 30), (1, 5), (2, 10), (2, 10), (3, 25)], [1, 2, 3, 2, 1], {1: 35, 2: 20, 3: 25}),
            # Of counters that are alike the smaller id.
            ([(9, 1), (3, 1), (6, 1)], [3, 6, 9], {3: 1, 6: 1, 9: 1}),
            # Base is an adapter, too.
            ([(0, 50), (5, 3), (0, 1)], [0, 5, 0], {0: 51, 5: 3}),
        ],
        ids=["by what it had", "alike", "base"],
    )
    def test_goes_first_and_pays_for_its_prompt(self, world, came, joined, counters):
        for adapter_id, prompt in came:
            world.come(adapter_id, prompt)

        _, found = world.step(places=len(came))

        assert [request.adapter_id for request in found] == joined
        assert world.counters == counters

    def test_is_asked_for_its_oldest_request_alone_when_that_may_not_join(self, world):
        first, _, other = world.come(4), world.come(4), world.come(7)

        asked, joined = world.step(places=9, may_join=lambda request: request.adapter_id == 7)

        assert (asked, joined) == ([first, other], [other])
        assert world.counters == {4: 0, 7: 1}

    def test_pays_for_every_token_of_its_answers_once(self, world):
        request = world.come(1, 10)
        world.step(places=1)

        for tokens in (1, 1, 4):
            world.answer(request, tokens)
            world.step()

        assert world.counters == {1: 10 + 2 * 4}

    def test_pays_for_the_last_tokens_of_what_has_finished_and_is_forgotten(self, world):
        request = world.come(1, 10)
        world.step(places=1)

        world.answer(request, 3)
        world.finish(request)
        world.step()
        world.answer(request, 9)
        world.step()

        assert world.counters == {1: 16}
        assert not world.policy._counted

    def test_is_by_weight(self):
        world = World(VirtualTokenCounter({1: 4.0}, prompt_weight=3.0, answer_weight=5.0))
        heavy, plain = world.come(1, 8), world.come(2, 8)
        world.step(places=2)

        world.answer(heavy, 2)
        world.answer(plain, 2)
        world.step()

        assert world.counters == {1: (24 + 10) / 4, 2: 24 + 10}

    def test_does_not_pay_twice_for_what_was_preempted(self, world):
        request = world.come(1, 10)
        world.step(places=1)
        world.answer(request, 2)
        world.preempt(request)

        world.step(places=1)

        assert world.counters == {1: 14}


class TestWhoComesAfterAPause:
    @pytest.mark.parametrize(("before", "after"), [(5, 40), (90, 90)], ids=["lifted", "loses nothing"])
    def test_begins_at_the_least_of_those_that_wait(self, world, before, after):
        world.policy.counters = {1: 40, 2: 70, 3: before}
        world.come(1), world.come(2)
        world.step()

        world.come(3)
        world.step()

        assert world.counters == {1: 40, 2: 70, 3: after}

    def test_and_finds_nobody_begins_where_the_last_one_went(self, world):
        world.policy.counters = {1: 100, 2: 30}
        world.come(2), world.come(1)
        world.step(places=2)  # in this order

        world.come(5)
        world.step()

        assert world.counters == {1: 101, 2: 31, 5: 101}

    def test_and_finds_nobody_begins_where_one_went_that_joined_again(self, world):
        request = world.come(1, 10)
        world.step(places=1)
        world.come(2)
        world.step(places=1)
        world.answer(request, 40)
        world.preempt(request)
        world.step(places=1)

        world.come(5)
        world.step()

        assert world.counters == {1: 90, 2: 11, 5: 90}  # 1 was the last to join, and did not pay again

    def test_lifts_nobody_by_what_others_have_who_come_with_it(self, world):
        """The first finds nobody. The others find the first, and whoever has more does not count."""
        world.policy.counters = {1: 10, 2: 500, 3: 4}
        for adapter_id in (1, 2, 3):
            world.come(adapter_id)

        world.step()

        assert world.counters == {1: 10, 2: 500, 3: 10}

    def test_is_whoever_did_not_wait_when_the_step_before_was_full(self, world):
        """1 has a request left when the step is full, 2 has none. Both come again; only 2 paused."""
        world.policy.counters = {1: 50, 2: 10, 3: 80}
        world.come(1), world.come(1), world.come(2), world.come(3)
        world.step(places=2)  # 2, then 1

        world.come(1), world.come(2)
        world.step()

        assert world.counters == {1: 51, 2: 51, 3: 80}

    def test_and_was_preempted_is_a_newcomer_by_its_old_place(self, world):
        request = world.come(1, 10)
        world.step(places=1)
        world.come(4)
        world.step(places=1)
        world.policy.counters = {1: 3, 2: 50, 4: 30}
        world.come(2)
        world.preempt(request)

        world.step()

        assert world.counters == {1: 30, 2: 50, 4: 30}  # 1 came first, and 4 was the last to join


class Literal:
    """Algorithm 2 of the paper, one arrival and one token at a time. What may not join is passed over."""

    def __init__(self, weights):
        self.weights, self.counters, self.queued, self.last = weights, {}, [], None

    def pay(self, adapter_id, tokens):
        self.counters[adapter_id] += tokens / self.weights.get(adapter_id, 1)

    def arrive(self, request):
        own = self.counters.get(request.adapter_id, 0)
        clients = {other.adapter_id for other in self.queued}
        if not clients:
            own = max(own, self.counters.get(self.last, 0))
        elif request.adapter_id not in clients:
            own = max(own, min(self.counters[client] for client in clients))
        self.counters[request.adapter_id] = own
        self.queued.append(request)

    def select(self, places, may_join):
        joined, refused = [], set()
        while len(joined) < places:
            clients = {r.adapter_id for r in self.queued} - refused
            if not clients:
                break
            client = min(clients, key=lambda c: (self.counters[c], c))
            request = next(r for r in self.queued if r.adapter_id == client)
            if may_join(request):
                self.queued.remove(request)
                self.last = client
                self.pay(client, request.num_prompt_tokens)
                joined.append(request)
            else:
                refused.add(client)
        return joined


@pytest.mark.parametrize("seed", range(12))
def test_it_serves_whom_the_paper_serves(seed):
    rng = np.random.default_rng(seed)
    weights = {2: 4.0, 5: 0.5}
    world, model = World(VirtualTokenCounter(weights)), Literal(weights)
    running, served = [], []

    for _ in range(150):
        for request in running:
            world.answer(request, request.num_output_tokens + 1)
            if rng.random() < 0.2:
                world.finish(request)
            model.pay(request.adapter_id, 2)
        running = [request for request in running if not request.is_finished]
        for _ in range(int(rng.choice([0, 0, 1, 3, 6]))):
            model.arrive(world.come(int(rng.integers(0, 7)), int(rng.integers(1, 40))))
        places = int(rng.integers(0, 4))
        closed = set(rng.integers(0, 7, 2).tolist())
        expected = model.select(places, lambda request, closed=closed: request.adapter_id not in closed)
        _, joined = world.step(places, lambda request, closed=closed: request.adapter_id not in closed)

        assert joined == expected
        assert world.counters == pytest.approx(model.counters)
        running += joined
        served += joined

    assert len(served) > 100


W_PROMPT, W_ANSWER = 1.0, 2.0


def service_gap(policy, arrivals, ranks, tokens, blocks):
    """The largest difference of two adapters' services over any time in which both have requests waiting."""
    replica = config(
        slots=len(ranks),
        memory=len(ranks),
        max_num_seqs=6,
        tokens=tokens,
        blocks=blocks,
        concurrent_reads=False,
        scheduling=policy,
    )
    made = fleet(replica, ranks=ranks)
    scheduler = made.replicas[0].scheduler
    service, history, update = {}, [], scheduler.update_from_output

    def watched(output, sampled):
        for s in output.scheduled:
            adapter = s.request.adapter_id
            if s.request.request_id in output.cached_tokens:
                service[adapter] = service.get(adapter, 0) + W_PROMPT * s.request.num_prompt_tokens
            if s.samples:
                service[adapter] = service.get(adapter, 0) + W_ANSWER
        answered = update(output, sampled)
        history.append((dict(service), set(scheduler.waiting.adapters)))
        return answered

    scheduler.update_from_output = watched
    made.serve(arrivals)
    largest = 0.0
    for a, b in itertools.combinations(range(1, len(ranks) + 1), 2):
        gaps = []
        for counted, waiting in history:
            if {a, b} <= waiting:
                gaps.append(counted.get(a, 0) - counted.get(b, 0))
                largest = max(largest, max(gaps) - min(gaps))
            else:
                gaps = []
    return largest


def greedy_and_modest(seed):
    """One adapter asks for far more than the others, in long requests; one comes after a pause; one stops and goes."""
    rng = np.random.default_rng(seed)
    flood = [Arrival(i * 1.0, 60, 40, 0) for i in range(120)]
    modest = [Arrival(i * 5.0, int(rng.integers(4, 30)), int(rng.integers(2, 20)), 1) for i in range(90)]
    late = [Arrival(250 + i * 2.0, 20, 10, 2) for i in range(80)]
    on_off = [Arrival(i // 20 * 150 + i % 20 * 1.0, 10, 30, 3) for i in range(60)]
    return sorted([*flood, *modest, *late, *on_off], key=lambda arrival: arrival.time_s)


@pytest.mark.parametrize("seed", range(4))
def test_it_keeps_the_papers_bound_where_first_come_first_served_does_not(seed):
    """Theorem 4.4: 2 max(w_p L, w_q M), with prompts of at most L tokens and M tokens of the KV cache."""
    blocks, longest = 60, 60
    bound = 2 * max(W_PROMPT * longest, W_ANSWER * blocks * 16)
    arrivals = greedy_and_modest(seed)

    fair = service_gap(lambda ranks: VirtualTokenCounter(), arrivals, (8,) * 4, 128, blocks)
    unfair = service_gap(None, arrivals, (8,) * 4, 128, blocks)

    assert 0 < fair <= bound
    assert unfair > 2 * fair


def test_weights_share_out_what_adapters_get():
    arrivals = sorted(
        (Arrival(float(i), 20, 20, adapter) for adapter in (0, 1) for i in range(120)),
        key=lambda arrival: arrival.time_s,
    )
    made = fleet(
        config(slots=2, max_num_seqs=4, scheduling=lambda ranks: VirtualTokenCounter({1: 3.0})), ranks=(8, 8)
    )

    made.serve(arrivals)

    # Until the heavier one has all of its 120, the other one gets a third of that.
    last = max(one.last_s for one in made.requests if one.arrival.adapter == 0)
    others = sum(one.last_s <= last for one in made.requests if one.arrival.adapter == 1)
    assert others == pytest.approx(120 / 3, abs=6)
