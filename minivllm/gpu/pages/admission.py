"""Slots without number: adapters are admitted while there are pages for them.

Beside `scheduled_loras` in vllm/v1/core/sched/scheduler.py (v0.22.1).
"""

from collections.abc import Iterable

from minivllm.core.lora_admission import LoRAAdmission
from minivllm.core.request_queue import WaitingQueue
from minivllm.gpu.pages.manager import ElasticModelManager


class ElasticAdmission(LoRAAdmission):
    """A `LoRAAdmission` that keeps pages for whom it lets in, so that a step never lacks them.

    The rules of waiting are the same: an adapter without pages is passed over, and once it is due others make way.
    """

    def __init__(
        self, max_loras: int, max_wait_steps: int, waiting: WaitingQueue, manager: ElasticModelManager
    ) -> None:
        super().__init__(max_loras, max_wait_steps, waiting)
        self.manager = manager
        self.joining = 0  # the adapter that was let in last: its request is about to ask for KV blocks

    def begin_step(self, running: Iterable[int], pinned: Iterable[int]) -> None:
        super().begin_step(running, pinned)
        self.joining = 0
        self.manager.keep_reserved(self.taken)

    def fits(self, adapter_id: int) -> bool:
        """Pages are kept for the adapter at once; idle adapters give way for them."""
        self.joining = 0
        if not super().fits(adapter_id):
            return False
        if adapter_id and not self.manager.reserve(adapter_id, self.spared | {adapter_id}):
            return False
        self.joining = adapter_id
        return True

    @property
    def spared(self) -> set[int]:
        """Adapters whose pages nobody else may have now."""
        return self.taken | self.pinned | self.manager.pool.ledger.reserved.keys() | {self.joining}

    def make_room(self, waiting: Iterable[int]) -> list[int]:
        """As in the parent class, but an adapter that is due may need the pages of several."""
        made_way = []
        for adapter_id in sorted(self.pinned):
            while not self.fits(adapter_id) and (victim := self._victim(min_held=0)) is not None:
                made_way.append(self._lose_slot(victim))
        for adapter_id in waiting:
            if self.waited(adapter_id) < self.max_wait_steps:
                break
            while not self.fits(adapter_id):
                victim = self._victim(min_held=self.max_wait_steps)
                if victim is None:
                    return made_way
                made_way.append(self._lose_slot(victim))
            self.take(adapter_id)
        return made_way

    def _lose_slot(self, adapter_id: int) -> int:
        self.manager.look_again()
        return super()._lose_slot(adapter_id)
