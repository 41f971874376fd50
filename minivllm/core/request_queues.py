"""The unfinished requests, by where they are. The lists of vllm/v1/core/sched/scheduler.py (v0.22.1), as one object.

Two have to do with them: the scheduler moves requests, and whoever keeps the records of adapters asks which of these
are in use. Both are given the object, and neither has to know the other.
"""

from collections import Counter

from minivllm.core.request import Request
from minivllm.core.waiting_queue import WaitingQueue


class RequestQueues:
    """What one scheduler has to do. It alone changes them; others only look, and keep the object, not its parts.

    requests    request id -> every unfinished request, wherever it is
    waiting     by arrival; a preempted request goes back to its place
    running     by admission, so that prompts in the making come after all who already answer
    in_flight   adapter id, 0 for base -> generation -> how many unfinished requests, waiting or running, are of it
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """No request any more, and no wait."""
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.in_flight: dict[int, Counter[int]] = {}

    def enter(self, request: Request) -> None:
        """It is unfinished from now on."""
        self.requests[request.request_id] = request
        self.in_flight.setdefault(request.adapter_id, Counter())[request.adapter_generation] += 1

    def leave(self, request: Request) -> None:
        """It has ended."""
        del self.requests[request.request_id]
        generations = self.in_flight[request.adapter_id]
        generations[request.adapter_generation] -= 1
        if not generations[request.adapter_generation]:
            del generations[request.adapter_generation]
        if not generations:
            del self.in_flight[request.adapter_id]
