"""Which loads of which adapters unfinished requests use. Nothing in vllm/v1 (v0.22.1): its reloads wait for nobody."""

from collections.abc import Collection

from minivllm.core.request import Request


class InFlight:
    """Unfinished requests, counted by adapter and generation; base is adapter 0."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, int]] = {}

    def add(self, request: Request) -> None:
        counts = self._counts.setdefault(request.adapter_id, {})
        counts[request.adapter_generation] = counts.get(request.adapter_generation, 0) + 1

    def remove(self, request: Request) -> None:
        counts = self._counts[request.adapter_id]
        counts[request.adapter_generation] -= 1
        if not counts[request.adapter_generation]:
            del counts[request.adapter_generation]
        if not counts:
            del self._counts[request.adapter_id]

    def generations(self, adapter_id: int) -> Collection[int]:
        """The generations of an adapter's unfinished requests, each once."""
        return self._counts.get(adapter_id, {}).keys()
