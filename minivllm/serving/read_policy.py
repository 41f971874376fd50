"""Which adapters are read beside steps, and which requests wait for them. vLLM (v0.22.1) reads in its steps."""

from collections.abc import Callable, Mapping
from typing import Protocol

from minivllm.core.request_queue import RequestQueues

# Why a request may not join yet: its adapter is being read.
LOADING = "loading"


class Reads(Protocol):
    """What reads adapters: threads (`AdapterReader`), or the simulator's clock (`minivllm.simulate.reader.Reader`)."""

    @property
    def held(self) -> Mapping[int, bool]:
        """Adapter id -> whether it has been read, of those that are being read, or were and wait for their requests."""

    def forget_unwanted(self) -> None:
        """Forget those that no request waits for."""


class ReadPolicy:
    """An adapter is read when a request for it comes to the head of the line, if there is room for one more.

    most     adapters that are being read, or were and wait for their requests to join; as many again may be so because
             a policy wanted them `ahead`, so that these take nobody's place
    queues   the scheduler's: who runs is of the step that is being made
    """

    def __init__(self, reads: Reads, most: int, queues: RequestQueues) -> None:
        self.reads, self.most, self.queues = reads, most, queues
        self.ahead: set[int] = set()

    def why_wait(self, adapter_id: int, begin: Callable[[], object]) -> str | None:
        """None, or LOADING while an adapter that is not in memory is being read.   begin: begins to read it"""
        if adapter_id not in self.reads.held:
            if not self.has_room():
                # Those that have been read wait for slots: the step reads this one, if nobody else is in it.
                is_reading = not all(self.reads.held.values())
                return LOADING if is_reading or self.queues.running else None
            begin()
        return None if self.reads.held[adapter_id] else LOADING

    def has_room(self, is_ahead: bool = False) -> bool:
        """Whether one more may be read; those that no request waits for leave when there is no room."""
        if self._count(is_ahead) >= self.most:
            self.reads.forget_unwanted()
        return self._count(is_ahead) < self.most

    def _count(self, is_ahead: bool) -> int:
        """Adapters that are held because a policy wanted them ahead, or because requests did."""
        held = self.reads.held
        left = set(held)
        if len(left) >= self.most:  # what the requests of this step have found is not waited for any more
            left -= {request.adapter_id for request in self.queues.running if held.get(request.adapter_id)}
        self.ahead &= left
        return len(self.ahead) if is_ahead else len(left) - len(self.ahead)
