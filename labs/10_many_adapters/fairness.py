"""Who was served least goes first. Nothing in vLLM (v0.22.1) counts what an adapter was served."""

from labs.kit.overlay import Todo
import heapq
from collections.abc import Iterator
from operator import attrgetter

from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler


class VirtualTokenCounter:
    """The adapter that was served least goes first. Sheng et al., "Fairness in Serving LLMs", OSDI 2024, algorithm 2.

    Every token that is computed for an adapter counts for it, divided by its weight. Base is an adapter, too.

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
        """Waiting requests, as a `SchedulingPolicy`. Who was asked and joins is out of `scheduler.waiting` at once.

        It has the `adapters` that requests wait for, and the `oldest` request of each; see `WaitingQueue`.
        """
        self._count_answers()
        self._lift_newcomers(scheduler)
        try:
            yield from self._least_served_first(scheduler)
        finally:  # the scheduler need not ask to the end
            self._waited = set(scheduler.waiting.adapters)

    # region lab 10.3: a virtual token counter
    def _least_served_first(self, scheduler: Scheduler) -> Iterator[Request]:
        """The oldest request of each adapter that waits, by counters; of equal ones the smaller id is first.

        Who joins pays for its prompt (`_joined`), and the next request of its adapter takes its place by what it has
        now. Of an adapter whose request may not join nobody else is asked in this step.
        """
        raise Todo("lab 10.3: a virtual token counter")

    def _serve(self, adapter_id: int, tokens: float) -> None:
        """So many tokens, times `prompt_weight` or `answer_weight`, count for an adapter, by its share in `weights`."""
        raise Todo("lab 10.3: a virtual token counter")

    def _joined(self, request: Request) -> None:
        """It runs from now on, and its adapter is the `_last`. It pays for its whole prompt, found in a cache or not.

        A preempted one that joins again is still in `_counted`, and does not pay twice.
        """
        raise Todo("lab 10.3: a virtual token counter")

    def _count_answers(self) -> None:
        """Tokens that came since this was called last, of all in `_counted`. Who has finished is forgotten."""
        raise Todo("lab 10.3: a virtual token counter")

    def _lift_newcomers(self, scheduler: Scheduler) -> None:
        """Adapters that wait now, and did not in the step before: none has a claim to what it did not ask for.

        In the order in which their requests came, each counter is lifted to the least of those that wait before it. If
        nobody does it is lifted to that of the adapter which joined last. No counter falls.
        """
        raise Todo("lab 10.3: a virtual token counter")

    # endregion
