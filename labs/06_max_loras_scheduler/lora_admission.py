"""The max_loras rule. Stands for `scheduled_loras` in vllm/v1/core/sched/scheduler.py (v0.22.1).

A request's adapter holds a slot as long as the request runs, whether it gets tokens in this step or not, because it
goes on in a later step. A pinned adapter holds its slot without any request.

A request whose adapter does not fit waits while others pass it, but its wait is bounded.
"""

from labs.kit.overlay import Todo
from collections import Counter
from collections.abc import Iterable

from minivllm.core.request_queue import WaitingQueue


# region lab 6.1: whose adapters hold a slot
# A blank page. What it promises: `lab api 6.1`, or labs/06_max_loras_scheduler/contracts/6.1.md
class LoRASlots:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise Todo("lab 6.1: whose adapters hold a slot")


# endregion


class LoRAAdmission:
    """Deals `max_loras` slots to adapters. It sees adapter ids only (0 = base) and moves no request itself.

    Two clocks, both in steps, decide who makes way for whom:
    waited(a)   how long adapter a has waited for a slot, since it was first passed over
    held[a]     how long adapter a has had one, since it brought its first token

    An adapter is due once it has waited `max_wait_steps`. It then takes the slot of an adapter that has held
    one for as long. So nobody waits without end, and nobody loses a slot before it was of use. Adapters that
    want the same slot have it in turns.

    slots    whose the slots are in the step that is being scheduled
    taken    adapters that have a slot, or for which one is kept: noted, since each adapter in line is held against it
    pinned   adapters whose slots are nobody else's, whether their requests run or not
    """

    def __init__(self, max_loras: int, max_wait_steps: int, waiting: WaitingQueue | None = None) -> None:
        self.max_loras = max_loras
        self.max_wait_steps = max_wait_steps
        self.waiting = WaitingQueue() if waiting is None else waiting
        self.held: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.taken: set[int] = set()
        self.slots = LoRASlots(max_loras)

    def begin_step(self, running: Iterable[int], pinned: Iterable[int]) -> None:
        """As `LoRASlots.begin_step`; the clocks run on."""
        self.pinned = set(pinned)
        self.slots.begin_step(running, self.pinned)
        self.taken = self.slots.holders()

    def fits(self, adapter_id: int) -> bool:
        """As `LoRASlots.fits`."""
        return self.slots.fits(adapter_id)

    def take(self, adapter_id: int) -> None:
        """As `LoRASlots.take`."""
        self.slots.take(adapter_id)
        if adapter_id and adapter_id not in self.taken:
            self.taken = self.slots.holders()

    def never_fits(self, adapter_id: int) -> bool:
        """As `LoRASlots.never_fits`."""
        return self.slots.never_fits(adapter_id)

    def pass_over(self, adapter_id: int) -> None:
        """A request of an adapter that does not fit has let others go first: from now on its wait counts."""
        self.waiting.pass_over(adapter_id)

    def waited(self, adapter_id: int) -> int:
        """Steps since it was passed over, 0 if it was not. Nothing is counted up: `WaitingQueue` knows since when."""
        return self.waiting.waited(adapter_id)

    # region lab 6.4: bounded wait
    def make_room(self, waiting: Iterable[int]) -> list[int]:
        """Adapters whose running requests must be preempted now. Slots are kept for those that are due.

        waiting     adapters that were passed over and would run if they had a slot, the longest wait first.
                    Many may wait: it is read no further than to the first that is not due

        First, while more slots are taken than there are, the cheapest adapter makes way, however short its turn was.
        It is so when a pin came in under running requests. Then every waiting adapter that is due takes a slot, the
        longest wait first. It is a free one, else that of the cheapest adapter which has had its turn. Where there is
        neither, those that are left wait on. `_victim` says who is cheapest, `_lose_slot` frees its slot.
        """
        raise Todo("lab 6.4: bounded wait")

    # endregion

    def end_step(self, ran: Iterable[int], sampled: set[int]) -> None:
        """A step was computed: move the clocks. Both arguments are adapter ids.

        ran         of the requests that ran in this step, also of those that ended with it
        sampled     of those that got a token
        """
        ran = set(ran) - {0}
        self.waiting.end_step()
        # A turn begins with its first token, or it might end before a long prompt is through, every time.
        self.held = {a: self.held.get(a, 0) + 1 for a in ran if a in self.held or a in sampled}

    def _victim(self, min_held: int) -> int | None:
        """The adapter that is cheapest to preempt: fewest running requests, then the longest turn.

        Only adapters with running requests and no pin that have held their slot for `min_held` steps. None without any.
        """
        running = self.slots.evictable()
        candidates = [a for a in running if self.held.get(a, 0) >= min_held]
        return min(candidates, key=lambda a: (running[a], -self.held.get(a, 0), a), default=None)

    def _lose_slot(self, adapter_id: int) -> int:
        """Its slot is free, and its wait begins; gives the id back."""
        self.slots.lose(adapter_id)
        self.taken = self.slots.holders()
        self.waiting.begin_wait(adapter_id)
        return adapter_id
