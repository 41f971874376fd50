"""Which adapters are read ahead of the steps that need them, and which requests wait for that.

Stands for nothing in vLLM 0.22.1, which reads adapters in its steps.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from minivllm.core.request_queue import RequestQueues

# Why a request may not join yet: its adapter is being read.
LOADING = "loading"


class Reads(Protocol):
    """Reads adapters in threads (`AdapterReader`) or on the simulator's clock (`minivllm.simulate.reader.Reader`)."""

    @property
    def held(self) -> Mapping[int, bool]:
        """Adapter id -> whether it has been read, of adapters that no step has taken yet."""

    def forget_unwanted(self) -> None:
        """Forget the adapters that no request waits for."""


class ReadPolicy:
    """Reads an adapter when a request for it is next in the queue, if there is room for one more.

    most     adapters that are being read, or have been read and wait for a step; as many again may be read because a
             prefetching policy wants them (`ahead`), so that prefetching delays no request
    queues   the scheduler's; `running` is that of the step that is being scheduled
    """

    def __init__(self, reads: Reads, most: int, queues: RequestQueues) -> None:
        self.reads, self.most, self.queues = reads, most, queues
        self.ahead: set[int] = set()

    def begin_or_wait(self, adapter_id: int, begin: Callable[[], object]) -> str | None:
        """LOADING while an adapter that is not in memory is being read, or waits for that; None once it has been read.

        begin   starts the read, and is called if there is room for one more
        """
        if adapter_id not in self.reads.held:
            if not self.has_room():
                # If all have been read they wait for slots: an empty step reads this one itself.
                is_reading = not all(self.reads.held.values())
                return LOADING if is_reading or self.queues.running else None
            begin()
        return None if self.reads.held[adapter_id] else LOADING

    def has_room(self, is_ahead: bool = False) -> bool:
        """Whether one more may be read. If not, adapters that no request waits for are forgotten first."""
        if self._count(is_ahead) >= self.most:
            self.reads.forget_unwanted()
        return self._count(is_ahead) < self.most

    def _count(self, is_ahead: bool) -> int:
        """Adapters that are held for a prefetching policy, or for requests."""
        held = self.reads.held
        left = set(held)
        if len(left) >= self.most:  # adapters that requests of this step take are not waited for any more
            left -= {request.adapter_id for request in self.queues.running if held.get(request.adapter_id)}
        self.ahead &= left
        return len(self.ahead) if is_ahead else len(left) - len(self.ahead)
