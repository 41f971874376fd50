"""Who is in memory and who is in a slot. Stands for the caches of vllm/lora/model_manager.py (v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Callable
from operator import attrgetter

from minivllm.config import LoRAConfig
from minivllm.lora.events import Listener, LoRAEvent
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lru_cache import LRUCache


class AdapterTiers:
    """Two tiers: at most `capacity` adapters are in CPU memory, at most `lora_slots` of these also in a slot.

    When a tier is full, what was used longest ago leaves it. RuntimeError where all must stay. Nothing is copied here.

    pinned_adapters   adapters that keep their slot, and so their place in memory
    in_use            adapters that a step needs, which stay as well
    listeners         hear of every event; nothing here depends on whether there are any
    """

    def __init__(self, lora_config: LoRAConfig) -> None:
        self.lora_config = lora_config
        self.use_caches(LRUCache)
        self.pinned_adapters: set[int] = set()
        self.in_use: frozenset[int] = frozenset()
        self.listeners: list[Listener] = []

    capacity = property(attrgetter("lora_config.max_cpu_loras"))
    lora_slots = property(attrgetter("lora_config.max_loras"))

    def use_caches(self, make_cache: Callable[[int], LRUCache]) -> None:
        """Have both tiers, which are empty, evict as other caches do.   make_cache: capacity -> a cache"""
        self._registered_adapters: LRUCache[LoRAModel] = make_cache(self.capacity)  # id -> weights
        self._active_adapters: LRUCache[int] = make_cache(self.lora_slots)  # id -> slot

    def __len__(self) -> int:
        return len(self._registered_adapters)

    def tell(self, kind: str, adapter_id: int, slot: int | None = None, **more: object) -> None:
        """Tell whoever listens of an event, given by the fields of `LoRAEvent`."""
        event = LoRAEvent(kind, adapter_id, slot, **more)
        for listener in self.listeners:
            listener(event)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Adapter id -> weights of all in memory, the least recently used first. A copy."""
        return dict(self._registered_adapters)

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """The weights if they are in memory. Looking does not count as use."""
        return self._registered_adapters.get(adapter_id)

    def list_active_adapters(self) -> dict[int, int]:
        """Adapter id -> slot, the least recently used first. A copy."""
        return dict(self._active_adapters)

    def get_free_slots(self) -> list[int]:
        """Slots that no adapter is in."""
        return sorted(set(range(self.lora_slots)).difference(self._active_adapters.values()))

    @property
    def kept(self) -> frozenset[int]:
        """Adapters that nobody may evict or drop."""
        return self.in_use | self.pinned_adapters

    @property
    def residents(self) -> tuple:
        """Ids in memory, and id and slot of those in slots, by use; the load ids of these; `in_use`."""
        memory, slots = self._registered_adapters, self._active_adapters
        loads = [memory[adapter_id].load_id for adapter_id in slots if adapter_id in memory]
        return list(memory), list(slots.items()), loads, self.in_use

    def touch_adapter(self, adapter_id: int) -> None:
        """Mark as just used, wherever it is."""
        for tier in (self._registered_adapters, self._active_adapters):
            if adapter_id in tier:
                tier.touch(adapter_id)

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Take the adapter out of its slot; a pin goes with it. False if it is in none.

        Its weights stay there until others overwrite them: no row is sent to a slot that the table calls free.
        """
        self.pinned_adapters.discard(adapter_id)
        return self._active_adapters.pop(adapter_id, None) is not None

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget the adapter, pinned or not, in both tiers. False for an unknown id."""
        self.deactivate_adapter(adapter_id)
        if was_there := self._registered_adapters.pop(adapter_id, None) is not None:
            self.tell("remove", adapter_id)
        return was_there

    def remove_all_adapters(self) -> None:
        for adapter_id in self.list_adapters():
            self.remove_adapter(adapter_id)

    # region lab 5.4: who has to go
    def _make_room_in_memory(self) -> None:
        """When memory is full, what was used longest ago leaves it."""
        raise Todo("lab 5.4: who has to go")

    def remove_oldest_adapter(self) -> bool:
        """Drop the least recently used adapter that is not `kept` from memory. False when memory is empty.

        It leaves its slot, too: an id that is not in memory may come back with other weights. Told are a "drop" and,
        if it had a slot, an "evict" from there.
        """
        raise Todo("lab 5.4: who has to go")

    def _find_slot(self) -> int:
        """The first free slot; if there is none, that of the active adapter used longest ago, which stays in memory.

        One that is `kept` is passed over. Told is an "evict" from that slot.
        """
        raise Todo("lab 5.4: who has to go")

    # endregion

    def has_room_for(self, adapter_id: int) -> bool:
        """Whether the adapter has a slot, or `_find_slot` would find one."""
        in_slots = self._active_adapters.keys()
        return adapter_id in in_slots or len(in_slots) < self.lora_slots or not in_slots <= self.kept
