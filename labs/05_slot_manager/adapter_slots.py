"""Adapters into slots. Stands for the half of vllm/lora/model_manager.py (v0.22.1) that copies weights."""

from labs.kit.overlay import Todo
import time

from minivllm.config import LoRAConfig
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.tiers import AdapterTiers
from minivllm.lora.wrapped_modules import WrappedModules


class AdapterSlots(AdapterTiers):
    """Brings adapters into memory and into the slots of a model's layers, and keeps them there while they are pinned.

    wrapped       the model's layers, which judge, pack and write weights
    slot_writer   what writes slots instead of the layers, on a GPU; else None
    """

    def __init__(self, lora_config: LoRAConfig, wrapped: WrappedModules, slot_writer: object | None) -> None:
        super().__init__(lora_config)
        self.wrapped = wrapped
        self.slot_writer = slot_writer

    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Accept an adapter and keep it in memory. False, and just used, if the id is there already.

        ValueError when it does not fit the model, RuntimeError when nobody in memory may go; nothing has changed.
        """
        if adapter.id in self._registered_adapters:
            self.touch_adapter(adapter.id)
            return False
        self.wrapped.accept(adapter)
        self._make_room_in_memory()
        self._stage(adapter)
        self._registered_adapters.put(adapter.id, adapter)
        return True

    def _stage(self, adapter: LoRAModel) -> None:
        """For a GPU: move the weights into page-locked memory, which it can copy from."""
        if self.slot_writer is not None:
            self.slot_writer.stage(adapter)

    def _write(self, adapter: LoRAModel, slot: int) -> None:
        (self.slot_writer or self.wrapped).write(adapter, slot)

    # region lab 5.2: copy first, then say so
    def activate_adapter(self, lora_id: int) -> bool:
        """Copy a registered adapter into a slot (`_write`). False, and just used, if it is in one already.

        ValueError that names an id that is not registered, before `_find_slot` evicts anybody for it. The slot
        table names an adapter only once all its weights are there; a failed copy leaves the slot free. Once the table
        names it, an "activate" is told with slot and seconds. They are by `time.perf_counter`, since the wall clock
        may be set back.

        To use: `_active_adapters`, the table, with its `put` (lru_cache.py), `touch_adapter`, `get_adapter` and
        `tell(kind, id, slot, seconds=...)` (tiers.py).
        """
        raise Todo("lab 5.2: copy first, then say so")

    # endregion

    # region lab 5.5: a pin holds a slot
    def pin_adapter(self, lora_id: int) -> bool:
        """Keep a registered adapter in a slot, and so in memory, until it is unpinned or removed.

        ValueError that names an unknown id, RuntimeError when no slot can be had. Nothing is pinned then: the slot,
        which may fail, comes first. The pin is noted in one place for both tiers, `pinned_adapters`.
        """
        raise Todo("lab 5.5: a pin holds a slot")

    def unpin_adapter(self, lora_id: int) -> bool:
        """Let an adapter be evicted again. False if it was not pinned."""
        raise Todo("lab 5.5: a pin holds a slot")

    # endregion

    # region lab 5.6: other weights under the same id
    def replace_adapter(self, adapter: LoRAModel) -> None:
        """Put other weights under a registered id, in memory and, if it has a slot, there; a pin holds on.

        ValueError that names an unknown id or what does not fit, and nothing has changed. What fits is staged
        (`_stage`) first, as by `add_adapter`. If copying fails the old weights are served on: they are back in memory
        and, if pinned, in a slot.
        """
        raise Todo("lab 5.6: other weights under the same id")

    # endregion
