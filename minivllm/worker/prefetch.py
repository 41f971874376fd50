"""An adapter comes into its slot while a step runs, on a GPU. Nothing in vllm/v1/worker/ (v0.22.1) does that."""

from contextlib import suppress

from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager


class AdapterPrefetch:
    """What a runner with a `lora_manager` does beside a running step."""

    lora_manager: LRUCacheWorkerLoRAManager | None = None

    def can_prefetch_lora(self, lora_id: int) -> bool:
        """Whether an adapter is in memory, in no slot, and could come into one beside a running step."""
        manager = self.lora_manager.manager
        if manager.slot_writer is None or manager.get_adapter(lora_id) is None:
            return False
        return lora_id not in manager.list_active_adapters()

    def prefetch_lora(self, lora_id: int) -> None:
        """Activate an adapter that the step launched last does not use, while that step runs; if there is room."""
        manager = self.lora_manager.manager
        if self.can_prefetch_lora(lora_id) and manager.has_room_for(lora_id):
            # What is wrong with the adapter is raised again in the step that it is for.
            with manager.slot_writer.behind_step(), suppress(Exception):
                manager.activate_adapter(lora_id)
