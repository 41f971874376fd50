"""What is read before its turn (lab 10.4). The oracles: a walk over all that has happened, and a slow disk."""

import numpy as np
import pytest
from fleets import config, fleet

from minivllm.core.request import Request
from minivllm.core.request_queue import WaitingQueue
from minivllm.lora.request import LoRARequest
from minivllm.policies.prefetching import ByQueuePosition, BySession, Waiting
from minivllm.sampling_params import SamplingParams
from minivllm.simulate.cost_model import CostModel
from minivllm.simulate.traffic import Arrival

pytestmark = pytest.mark.lab("10.4")


def requests(*adapter_ids):
    """In the order in which they came."""
    made = []
    for order, adapter_id in enumerate(adapter_ids):
        lora = LoRARequest(f"adapter{adapter_id}", adapter_id, f"/{adapter_id}") if adapter_id else None
        made.append(Request(str(order), [1], SamplingParams(), lora))
        made[-1].arrival_order = order
    return made


def queue_of(requests, queue=None):
    queue = WaitingQueue() if queue is None else queue
    for request in requests:
        queue.add(request)
    return queue


def known(now=0.0, arrived=(), answered=(), queue=(), capacity=8):
    return Waiting(now, requests(*arrived), requests(*answered), queue_of(requests(*queue)), capacity)


class TestByQueuePosition:
    def test_names_the_adapters_of_the_first_in_the_queue_in_their_order(self):
        wanted = list(ByQueuePosition(4)(known(queue=(7, 3, 9, 3, 5, 2))))

        assert list(dict.fromkeys(wanted)) == [7, 3, 9]

    def test_reads_nothing_for_base_which_has_its_place_all_the_same(self):
        assert list(ByQueuePosition(3)(known(queue=(0, 4, 0, 6)))) == [4]

    def test_names_nobody_where_nobody_waits(self):
        assert list(ByQueuePosition()(known(arrived=(), queue=()))) == []

    def test_looks_no_further_than_it_must(self):
        """A long queue is not walked in every step."""

        class LongQueue(WaitingQueue):
            def __iter__(self):
                for number, request in enumerate(super().__iter__()):
                    assert number < 20, "it walks the whole queue"
                    yield request

        queue = queue_of(requests(*range(1, 100)), LongQueue())
        waiting = Waiting(0.0, [], [], queue, 8)

        assert list(ByQueuePosition(5)(waiting)) == [1, 2, 3, 4, 5]

    def test_makes_up_for_a_slow_disk(self):
        """Five adapters, 6 s to read each, 8 s to serve each, one at a time. Only the first has to be waited for."""
        cost = CostModel({"steps": 8.0}, copy_bytes_per_s=1e12, read_s=6.0, read_bytes_per_s=1e12)
        ends = {}

        for name, policy in (("turn", None), ("ahead", ByQueuePosition)):
            made = fleet(config(slots=2, memory=5, max_num_seqs=1, prefetching=policy), cost)
            made.serve([Arrival(0.0, 4, 1, adapter) for adapter in range(5)])
            ends[name] = made.now

        assert ends["ahead"] == pytest.approx(6 + 5 * 8, abs=0.1)
        assert ends["turn"] == pytest.approx(ends["ahead"] + 2 * 6, abs=0.1)  # two more are waited for


class Walked:
    """By going through all answers that there ever were."""

    def __init__(self, think_s):
        self.think_s, self.answers = think_s, []

    def __call__(self, waiting):
        self.answers += [(waiting.now, r.adapter_id) for r in waiting.answered if r.adapter_id]
        fresh = []
        for when, adapter_id in reversed(self.answers):
            if waiting.now - when <= self.think_s and adapter_id not in fresh:
                fresh.append(adapter_id)
        came = [request.adapter_id for request in waiting.arrived if request.adapter_id]
        return came + fresh[: waiting.capacity // 2]


class TestBySession:
    def test_names_who_has_just_come_before_who_may_ask_again(self):
        policy = BySession()
        policy(known(now=1.0, answered=(4, 6)))

        assert list(policy(known(now=2.0, arrived=(9, 0, 3)))) == [9, 3, 6, 4]

    def test_names_who_was_answered_last_first_and_once(self):
        policy = BySession()
        for now, answered in ((1.0, (4,)), (2.0, (5,)), (3.0, (4, 0))):
            policy(known(now=now, answered=answered))

        assert list(policy(known(now=4.0))) == [4, 5]

    def test_keeps_half_of_memory_for_them(self):
        policy = BySession()
        policy(known(answered=range(1, 9)))

        assert list(policy(known(now=1.0, capacity=7))) == [8, 7, 6]
        assert list(policy(known(now=1.0, capacity=1))) == []

    def test_forgets_who_has_not_come_back_for_so_long(self):
        policy = BySession(think_s=10.0)
        policy(known(now=1.0, answered=(4,)))
        policy(known(now=5.0, answered=(5,)))

        assert list(policy(known(now=11.0))) == [5, 4]
        assert list(policy(known(now=11.5))) == [5]
        assert list(policy(known(now=15.5))) == []
        assert not policy._answered_at

    @pytest.mark.parametrize("seed", range(8))
    def test_names_whom_a_walk_over_all_answers_names(self, seed):
        rng = np.random.default_rng(seed)
        policy, walked, now = BySession(think_s=6.0), Walked(6.0), 0.0
        named = set()

        for _ in range(200):
            now += float(rng.choice([0.0, 0.5, 1.0, 4.0]))
            arrived = rng.integers(0, 12, int(rng.integers(0, 3))).tolist()
            answered = rng.integers(0, 12, int(rng.choice([0, 0, 1, 3]))).tolist()
            waiting = known(now, arrived, answered, capacity=int(rng.integers(1, 10)))

            found = list(policy(waiting))

            # Whoever has come and was answered may be named once or twice: it is read once.
            assert list(dict.fromkeys(found)) == list(dict.fromkeys(walked(waiting)))
            named |= set(found)

        assert named == set(range(1, 12))
