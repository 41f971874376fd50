"""As many adapters in slots as memory has pages for.

Beside vllm/lora/model_manager.py (v0.22.1), where the number of slots is fixed.
"""

from collections.abc import Set

from minivllm.gpu.pages.pool import PagePool
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LRUCacheLoRAModelManager


class ElasticModelManager(LRUCacheLoRAModelManager):
    """An `LRUCacheLoRAModelManager` whose adapters lie in the pages of its backend's `pool`.

    Slots are rows of a table, and pages are what there may be too few of.

    An adapter that nobody uses keeps its pages until somebody needs them: another adapter, or the KV cache. Then it
    gives way, the one used longest ago first.
    """

    _least_refused: int | None = None  # pages that could not be had, until some come free

    @property
    def pool(self) -> PagePool:
        return self.punica_wrapper.pool

    def rank_of(self, adapter: LoRAModel) -> int:
        """The largest of all modules of an accepted adapter, by B, of which no process has fewer ranks; 0 for none."""
        parts = (part for weights in adapter.loras.values() for part in weights.parts if part is not None)
        return max((part.lora_b.shape[-1] for part in parts), default=0)

    def get_memory_stats(self) -> dict[str, object]:
        """As of any manager, and "pages": bytes of those that slots have. They are of the KV cache's memory."""
        held = sum(map(len, self.pool.ledger.held.values()))
        return super().get_memory_stats() | {"pages": held * self.pool.page_bytes}

    def pages_for(self, adapter_id: int) -> int:
        """That the adapter will take: by its ranks if it is in memory, else by the largest there may be."""
        lora = self.get_adapter(adapter_id)
        return self.pool.pages_a_slot if lora is None else self.pool.pages_for(self.rank_of(lora))

    def reserve(self, adapter_id: int, spare: Set[int]) -> bool:
        """Keep pages for an adapter that will come into a slot, if it is in none.

        spare   adapters that must not give way. False, and nothing else is kept, when there are too few pages then
        """
        if adapter_id in self.tiers.slots:
            return True
        wanted = self.pages_for(adapter_id)
        if len(self.pool.ledger.reserved.get(adapter_id, ())) >= wanted:
            return True  # an adapter that was refused since then lacked these pages, too
        if self._least_refused is not None and wanted >= self._least_refused:
            return False
        ledger = self.pool.ledger
        idle = sum(len(ledger.held.get(slot, ())) for slot in self.idle(spare))
        if ledger.within_reach(adapter_id, wanted) + idle < wanted:
            self._least_refused = wanted  # and nobody gave way for nothing
            return False
        while not ledger.reserve(adapter_id, wanted):
            if self.give_way(spare) is None:
                return False
        return True

    def look_again(self) -> None:
        """Adapters that were refused may fit now, because pages have become free."""
        self._least_refused = None

    def keep_reserved(self, adapter_ids: Set[int]) -> None:
        """Give back what is kept for others than these."""
        self.look_again()
        self.pool.ledger.release_reserved(adapter_ids)

    def idle(self, spare: Set[int]) -> list[int]:
        """Slots with pages that nobody needs: free ones, and those of adapters that may give way."""
        active = self.list_active_adapters()
        in_use = set(active.values())
        spare = spare | self.tiers.pinned
        free = [slot for slot in self.pool.ledger.held if slot not in in_use]
        return free + [slot for adapter_id, slot in active.items() if adapter_id not in spare]

    def give_way(self, spare: Set[int], of_use: Set[int] | None = None) -> int | None:
        """Take the pages of one idle slot: of a free one, else of the adapter that eviction would choose.

        of_use   slots that will do; None = any that has pages

        Told is an "evict". None when there is no such slot.
        """
        if of_use is None:
            of_use = {slot for slot, pages in self.pool.ledger.held.items() if pages}
        active = self.list_active_adapters()
        slot = next((held for held in of_use if held not in active.values()), None)
        if slot is None:
            spare = spare | self.tiers.pinned | {a for a, held in active.items() if held not in of_use}
            if active.keys() <= spare:
                return None
            victim, slot = self.tiers.slots.remove_oldest(spare=spare)
            self.tell("evict", victim, slot)
        self._free_pages(slot)
        return slot

    def _free_pages(self, slot: int) -> None:
        """The next adapter that gets the pages writes after the writes to them that are under way."""
        if self.slot_writer is not None:
            self.slot_writer.wait_for(slot)
        self.pool.ledger.free_slot(slot)
        self._least_refused = None

    def deactivate_adapter(self, adapter_id: int) -> bool:
        slot = self.tiers.slots.get(adapter_id)
        was_active = super().deactivate_adapter(adapter_id)
        if was_active:
            self._free_pages(slot)
        return was_active

    def remove_adapter(self, adapter_id: int) -> bool:
        was_there = super().remove_adapter(adapter_id)
        self.pool.ledger.release_reserved(self.pool.ledger.reserved.keys() - {adapter_id})
        return was_there

    def has_room_for(self, adapter_id: int) -> bool:
        """Whether it has a slot, or there are one and pages for it; these are kept for it then."""
        return super().has_room_for(adapter_id) and self.reserve(adapter_id, self.tiers.kept)

    def pin_adapter(self, lora_id: int) -> bool:
        """As in the core; RuntimeError, too, where pins would leave no pages for an adapter of the largest rank."""
        pages = sum(map(self.pages_for, self.tiers.pinned | {lora_id}))
        if pages + self.pool.pages_a_slot > self.pool.ledger.count:
            raise RuntimeError(
                f"adapter {lora_id} cannot be pinned: {pages} of {self.pool.ledger.count} pages would be pinned; "
                "unpin one, or leave LoRA more memory"
            )
        return super().pin_adapter(lora_id)

    def write_slot(self, adapter: LoRAModel, slot: int) -> None:
        """Pages first: a slot that is written has room for all ranks. RuntimeError when there are too few."""
        wanted = self.pool.pages_for(self.rank_of(adapter))
        if not self.pool.regions:
            self.pool.bind_own(self.lora_slots * self.pool.pages_a_slot)
        self._free_pages(slot)
        self.reserve(adapter.id, self.tiers.kept)
        self.pool.ledger.assign(adapter.id, slot, wanted)
        super().write_slot(adapter, slot)
