"""The max_loras rule. Stands for `scheduled_loras` in vllm/v1/core/sched/scheduler.py (v0.22.1).

A request's adapter holds a slot as long as the request runs, whether it gets tokens in this step or not, because it
goes on in a later step. A pinned adapter holds its slot without any request.

A request whose adapter does not fit waits while others pass it, but its wait is bounded.
"""

from collections import Counter
from collections.abc import Iterable

from minivllm.core.request_queue import WaitingQueue


# region lab 6.1: whose adapters hold a slot
class LoRASlots:
    """The `max_loras` slots of a step: who has one, and who may still have one. It sees adapter ids only (0 = base).

    pinned        adapters whose slots are nobody else's, whether their requests run or not
    num_running   adapter -> how many of its requests run; base is not in it
    taken         adapters that have a slot, or for which one is kept
    """

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.pinned: set[int] = set()
        self.num_running: Counter[int] = Counter()
        self.taken: set[int] = set()

    def begin_step(self, running: Iterable[int], pinned: Iterable[int]) -> None:
        """A step begins: what was noted in the step before does not count any more, and nobody is admitted yet.

        running     the adapter of each running request, also of those that get no tokens in this step
        pinned      adapters whose slots are pinned, also those that no request uses
        """
        self.pinned = set(pinned)
        self.num_running = Counter(adapter_id for adapter_id in running if adapter_id)
        self.taken = self.pinned | set(self.num_running)

    def fits(self, adapter_id: int) -> bool:
        """Whether a request of this adapter, or of base, can join the batch that there is by now."""
        return adapter_id == 0 or adapter_id in self.taken or len(self.taken) < self.max_loras

    def take(self, adapter_id: int) -> None:
        """A request of an adapter that fits, or of base, has joined, or a slot is kept for one that will."""
        if adapter_id:
            self.taken.add(adapter_id)

    def never_fits(self, adapter_id: int) -> bool:
        """Whether every slot is pinned for others, so that no amount of waiting helps."""
        return adapter_id not in self.pinned | {0} and len(self.pinned) >= self.max_loras

    def lose(self, adapter_id: int) -> None:
        """The running requests of an adapter that is not pinned are preempted: it has no slot now."""
        del self.num_running[adapter_id]
        self.taken.remove(adapter_id)

    def holders(self) -> set[int]:
        """Adapters that have a slot, or for which one is kept. A copy."""
        return set(self.taken)

    def evictable(self) -> dict[int, int]:
        """Adapters that could lose their slot, since they run and are not pinned -> how many of their requests run."""
        return {a: requests for a, requests in self.num_running.items() if a not in self.pinned}


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
        made_way = []
        while len(self.taken) > self.max_loras and (victim := self._victim(min_held=0)) is not None:
            made_way.append(self._lose_slot(victim))
        for adapter_id in waiting:
            if self.waited(adapter_id) < self.max_wait_steps:
                break
            if not self.fits(adapter_id):
                victim = self._victim(min_held=self.max_wait_steps)
                if victim is None:
                    break
                made_way.append(self._lose_slot(victim))
            self.take(adapter_id)
        return made_way

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
