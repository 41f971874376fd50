"""Who waits in which place of the line. vLLM (v0.22.1) has "fcfs" and "priority" (vllm/v1/core/sched/request_queue.py).

A policy is called in every step in which somebody waits, and names waiting requests in the order in which they are
asked whether they can join: `first_come_first_served` is one. It may look at all that the scheduler knows, and changes
nothing. The scheduler asks until the step is full. Adapters that wait too long for a slot get one, whatever the order.
"""

import heapq
from collections.abc import Callable, Iterator

from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler, SchedulingPolicy, first_come_first_served, is_full
from minivllm.policies.fairness import VirtualTokenCounter

# How many later requests may go before one, where a policy promises it.
PATIENCE = 64


def due(scheduler: Scheduler) -> Iterator[Request]:
    """The oldest request of each adapter that has waited for a slot as long as it must, the longest wait first."""
    for adapter_id in scheduler.waiting.longest_wait_first():
        if scheduler.waiting.waited(adapter_id) < scheduler.scheduler_config.max_lora_wait_steps:
            break
        yield scheduler.waiting.oldest(adapter_id)


class BoundedOvertaking:
    """By arrival, but a request may stand up to `patience` places further back. Nobody is overtaken by more than that.

    A request's key is its place by arrival plus `patience` times its handicap. Those with small keys go first. The
    handicap is the same for all requests of an adapter, and they follow each other by arrival.

    handicap   (scheduler, the oldest request of an adapter) -> 0 (goes first) to 1
    """

    def __init__(self, handicap: Callable[[Scheduler, Request], float], patience: int = PATIENCE) -> None:
        self.handicap, self.patience = handicap, patience

    def __call__(self, scheduler: Scheduler, output: SchedulerOutput) -> Iterator[Request]:
        if is_full(scheduler, output):
            return
        yield from due(scheduler)
        waiting = scheduler.waiting
        heads = [self._place(scheduler, adapter_id) for adapter_id in waiting.adapters]
        heapq.heapify(heads)
        while heads:
            _, arrival, adapter_id = heapq.heappop(heads)
            request = waiting.requests.get(arrival)
            if request is not None:
                yield request
            # Who joined is followed by the next of its adapter. Who did not stands for all of them.
            if arrival not in waiting.requests and waiting.oldest(adapter_id) is not None:
                heapq.heappush(heads, self._place(scheduler, adapter_id))

    def _place(self, scheduler: Scheduler, adapter_id: int) -> tuple[float, int, int]:
        request = scheduler.waiting.oldest(adapter_id)
        key = request.arrival_order + self.patience * self.handicap(scheduler, request)
        return key, request.arrival_order, adapter_id


def adapter_is_absent(scheduler: Scheduler, request: Request) -> float:
    """Adapter-affine: whose adapter runs or keeps a slot goes first."""
    return float(request.adapter_id not in scheduler.lora.taken and request.adapter_id != 0)


class RankDiffers:
    """Rank-aware: whose adapter is of no higher rank than those that run goes first, as in CaraServe (2024).

    ranks   adapter id -> rank; 0 for one that is not there
    """

    def __init__(self, ranks: Callable[[int], int]) -> None:
        self.ranks = ranks

    def __call__(self, scheduler: Scheduler, request: Request) -> float:
        highest = max(map(self.ranks, scheduler.lora.taken), default=0)
        rank = self.ranks(request.adapter_id)
        return 0.0 if rank <= highest or not highest else 1 - highest / rank


def prompt_length(scheduler: Scheduler, request: Request) -> float:
    """Shortest first: by the tokens of its prompt, of 4,096 or of as many as a request may have."""
    return min(1.0, request.num_prompt_tokens / (scheduler.max_model_len or 4096))


# Name -> what makes a policy for one engine; its argument gives an adapter's rank.
POLICIES: dict[str, Callable[[Callable[[int], int]], SchedulingPolicy]] = {
    "fcfs": lambda ranks: first_come_first_served,
    "adapter-affine": lambda ranks: BoundedOvertaking(adapter_is_absent),
    "rank-aware": lambda ranks: BoundedOvertaking(RankDiffers(ranks)),
    "shortest-first": lambda ranks: BoundedOvertaking(prompt_length),
    "fair": lambda ranks: VirtualTokenCounter(),
}
