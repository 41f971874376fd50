"""Who waits in which place of the line. vLLM (v0.22.1) has "fcfs" and "priority" (vllm/v1/core/sched/request_queue.py).

A policy is called in every step in which somebody waits, and names waiting requests in the order in which they are
asked whether they can join: `Scheduler.line` is one. It may look at all that the scheduler knows, and changes nothing.
The scheduler asks until the step is full. Adapters that wait too long for a slot get one, whatever the order.
"""

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter

from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step_policy import StepPolicy

SchedulingPolicy = Callable[[Scheduler, SchedulerOutput], Iterator[Request]]

fcfs = StepPolicy.line

# How many later requests may go before one, where a policy promises it.
PATIENCE = 64


def install_scheduling(scheduler: Scheduler, policy: SchedulingPolicy) -> None:
    """Have the scheduler ask in the policy's order from now on."""
    scheduler.line = partial(policy, scheduler)


def is_full(scheduler: Scheduler, output: SchedulerOutput) -> bool:
    """Whether nobody can join this step, so that no order need be made."""
    return scheduler._full(output) is not None


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


class VirtualTokenCounter:
    """The adapter that was served least goes first. Sheng et al., "Fairness in Serving LLMs", OSDI 2024, algorithm 2.

    Every token that is computed for an adapter counts for it, divided by its weight. Base is an adapter, too. Who
    comes after a pause has no claim to what it did not ask for: its counter is lifted to the least of those that wait.

    While two adapters want more than they get, their services differ by no more than `2 * max(prompt_weight * longest
    prompt, answer_weight * tokens in the KV cache)`. That holds where slots are no fewer than adapters.

    weights         adapter id -> its share; 1 for those that are not there
    prompt_weight, answer_weight   of a token of a prompt, and of an answer
    counters        adapter id -> what it was served
    """

    def __init__(
        self, weights: dict[int, float] | None = None, prompt_weight: float = 1.0, answer_weight: float = 2.0
    ) -> None:
        self.weights, self.prompt_weight, self.answer_weight = weights or {}, prompt_weight, answer_weight
        self.counters: dict[int, float] = {}
        self._counted: dict[Request, int] = {}  # requests that joined -> tokens of their answers that count
        self._waited: set[int] = set()  # adapters that did in the step before
        self._last: int | None = None  # the adapter that joined last

    def __call__(self, scheduler: Scheduler, output: SchedulerOutput) -> Iterator[Request]:
        self._count_answers()
        self._lift_newcomers(scheduler)
        heads = [(self.counters[a], a) for a in scheduler.waiting.adapters]
        heapq.heapify(heads)
        try:
            while heads and not is_full(scheduler, output):
                _, adapter_id = heapq.heappop(heads)
                request = scheduler.waiting.oldest(adapter_id)
                yield request
                if request not in scheduler.waiting:
                    self._joined(request)
                    if scheduler.waiting.oldest(adapter_id) is not None:
                        heapq.heappush(heads, (self.counters[adapter_id], adapter_id))
        finally:  # the scheduler need not ask to the end
            self._waited = set(scheduler.waiting.adapters)

    def serve(self, adapter_id: int, tokens: float) -> None:
        self.counters[adapter_id] += tokens / self.weights.get(adapter_id, 1.0)

    def _joined(self, request: Request) -> None:
        self._last = request.adapter_id
        if request not in self._counted:  # else it was preempted, and has paid
            self.serve(request.adapter_id, self.prompt_weight * request.num_prompt_tokens)
            self._counted[request] = 0

    def _count_answers(self) -> None:
        for request, counted in list(self._counted.items()):
            new_tokens = request.num_output_tokens - counted
            self.serve(request.adapter_id, self.answer_weight * new_tokens)
            self._counted[request] += new_tokens
            if request.is_finished:
                del self._counted[request]

    def _lift_newcomers(self, scheduler: Scheduler) -> None:
        """Adapters that wait and did not in the step before, in the order in which they came."""
        waiting = scheduler.waiting
        newcomers = [waiting.oldest(a) for a in waiting.adapters if a not in self._waited]
        least = min((self.counters[a] for a in waiting.adapters if a in self._waited), default=None)
        for request in sorted(newcomers, key=attrgetter("arrival_order")):
            if least is None:
                least = self.counters.get(self._last, 0.0)
            own = max(self.counters.get(request.adapter_id, 0.0), least)
            self.counters[request.adapter_id] = own
            least = min(least, own) if len(newcomers) < len(waiting.adapters) else own


# Name -> what makes a policy for one engine, whose adapters' ranks it is told.
POLICIES: dict[str, Callable[[Callable[[int], int]], SchedulingPolicy]] = {
    "fcfs": lambda ranks: fcfs,
    "adapter-affine": lambda ranks: BoundedOvertaking(adapter_is_absent),
    "rank-aware": lambda ranks: BoundedOvertaking(RankDiffers(ranks)),
    "shortest-first": lambda ranks: BoundedOvertaking(prompt_length),
    "fair": lambda ranks: VirtualTokenCounter(),
}
