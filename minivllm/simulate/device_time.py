"""The times at which a device finishes steps and copies. Stands for a GPU's streams and its copy engine."""

from __future__ import annotations

from collections.abc import Iterable


class DeviceTime:
    """Steps one after the other, and concurrently with them copies into slots, one after the other as well.

    free_at     seconds: when all steps that were launched are finished
    """

    def __init__(self) -> None:
        self.free_at = 0.0
        self._link_free = 0.0
        self._written_at: dict[int, float] = {}  # adapter id -> when its last copy is finished

    def copy(self, adapter_id: int, begins: float, seconds: float) -> None:
        """Copy an adapter into a slot, as soon as the link is free."""
        self._link_free = max(self._link_free, begins) + seconds
        self._written_at[adapter_id] = self._link_free

    def run(
        self, launched_at: float, seconds: float, adapter_ids: Iterable[int], kernels_s: float = 0.0
    ) -> None:
        """Compute a step once the one before is finished and its adapters are written.

        kernels_s   so long after `launched_at` the host launches its kernels, so the step is not finished before
        """
        begins = max(launched_at, self.free_at)
        if self._written_at:
            begins = max([begins, *(self._written_at.get(adapter_id, 0.0) for adapter_id in adapter_ids)])
            self._written_at = {a: at for a, at in self._written_at.items() if at > begins}
        self.free_at = max(begins + seconds, launched_at + kernels_s)
