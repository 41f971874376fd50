"""Pins that wait for a slot. Stands for `pin_lora` of vllm/v1/worker/gpu_worker.py (v0.22.1), which never waits."""

import logging
from collections.abc import Iterable

from minivllm.engine.adapter import Adapter
from minivllm.engine.adapter_changes import AdapterChanges
from minivllm.errors import RuntimeRefusal, is_recoverable, recoverable
from minivllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)


class AdapterPins(AdapterChanges):
    """Adapters that keep a slot, and the room in memory that they and the running ones leave."""

    def _has_memory_for(self, adapter: Adapter) -> bool:
        """Whether it is in memory, or could be with nothing dropped that is pinned or in use."""
        self._spare_who_runs()
        held = self.manager.list_adapters().keys()
        return adapter.id in held or len(held) < self.manager.capacity or not held <= self.manager.kept

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep the adapter in a slot: at once, or after the next step if running requests hold all slots.

        ValueError for an unknown id, RuntimeError when every slot is pinned already. After any error it is pinned only
        if it was before.
        """
        if adapter_id not in self.adapters:
            raise ValueError(f"Pinning failed. LoRA {adapter_id} is not registered.")
        pins = self.pinned | {adapter_id}
        if len(pins) > self.manager.lora_slots:
            raise RuntimeRefusal(
                f"adapter {adapter_id} cannot be pinned: all {self.manager.lora_slots} slots are pinned "
                f"(adapters {sorted(pins - {adapter_id})}); unpin one or raise max_loras"
            )
        adapter, was_pinned = self.adapters[adapter_id], adapter_id in self.pinned
        self.pinned.add(adapter_id)
        try:
            if self._has_memory_for(adapter):
                self._pin(adapter)
        except BaseException:
            if not was_pinned:
                self._drop_pin(adapter_id)
            raise
        return True

    def _pin(self, adapter: Adapter) -> None:
        """Read it if need be, and pin it if there is a slot."""
        if adapter.id not in self.manager.list_adapters():
            self._read(adapter)
        if self.manager.has_room_for(adapter.id):
            self.worker.pin_adapter(adapter.id)
            self.manager.tell("pin", adapter.id, self.manager.list_active_adapters()[adapter.id])

    def _drop_pin(self, adapter_id: int) -> None:
        self.manager.unpin_adapter(adapter_id)
        self.pinned.discard(adapter_id)

    def _read(self, adapter: Adapter) -> None:
        """Have the version that is the next to be served in memory, and in a slot if there is one.

        If that fails and no request waits for it, what was not in memory is not, and the record goes back.
        """
        was_held = self.manager.get_adapter(adapter.id) is not None
        try:
            self.worker.add_adapter(self._next_to_serve(adapter))
        except BaseException as error:
            if is_recoverable(error) and not was_held and not self._in_flight(adapter):
                self.worker.remove_adapter(adapter.id)  # it may have been read, and not come into its slot
                self._go_back_from_unread(adapter)
            raise
        self._note_read(adapter, adapter.current_generation)

    def _next_to_serve(self, adapter: Adapter) -> LoRARequest:
        """What new requests get; while a reload waits for older requests, what the oldest of these was promised."""
        if not adapter.reloads:
            return adapter.request
        running = [request for request in self.scheduler.running if request.adapter_id == adapter.id]
        oldest = running[0] if running else self.scheduler.waiting.oldest(adapter.id)
        return adapter.request if oldest is None else oldest.lora_request

    def unpin_lora(self, adapter_id: int) -> bool:
        """Let the adapter be evicted again. False if it was not pinned."""
        was_pinned = adapter_id in self.pinned
        self._drop_pin(adapter_id)
        if was_pinned:
            self.manager.tell("unpin", adapter_id)
        return was_pinned

    def _pin_wanted(self) -> None:
        """Pin what waited for a slot. A pin whose adapter cannot be read any more is dropped, with a warning."""
        wanted = self.pinned - self.manager.pinned_adapters
        if wanted:
            self._spare_who_runs()
        for adapter in [self.adapters[adapter_id] for adapter_id in sorted(wanted)]:
            try:
                self._pin(adapter)
            except BaseException as error:
                recoverable(error)
                self._drop_pin(adapter.id)
                logger.warning("adapter '%s' could not be pinned: %s", adapter.request.lora_name, error)

    def prepare(self, lora_requests: Iterable[LoRARequest | None]) -> dict[int, BaseException]:
        """Pin what waits for a slot, then read what a step needs and is not in memory.

        Call it when the step is scheduled, since the scheduler made room then. Returns adapter id -> why it could not
        be read.
        """
        self._pin_wanted()
        requests = [request for request in lora_requests if request is not None]
        failures = self.worker.prepare_adapters(requests)
        for adapter_id in {request.lora_int_id for request in requests} - failures.keys():
            self._note_read(self.adapters[adapter_id], self.adapters[adapter_id].current_generation)
        return failures
