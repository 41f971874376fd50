"""Who is in memory, who is in a slot, and who has to go. Stands for the two caches of vllm/lora/model_manager.py
(v0.22.1)."""

from labs.kit.overlay import Todo
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from minivllm.config import LoRAConfig
from minivllm.lora.events import Listener, LoRAEvent
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.lru_cache import LRUCache

# (capacity, id -> weights in memory or None) -> the cache of a tier.
MakeCache = Callable[[int, Callable[[int], LoRAModel | None]], LRUCache]

# Events that say nothing of their own, above all the hits of each step, are alike: one stands for all of them.
same_event = lru_cache(maxsize=4096)(LoRAEvent)


def least_recently_used(capacity: int, get_adapter: Callable[[int], LoRAModel | None]) -> LRUCache:
    """A cache that forgets what was used longest ago, whatever the adapters are."""
    return LRUCache(capacity)


class AdapterTiers:
    """Two tiers of adapters: `capacity` in CPU memory, and `lora_slots` of these in a slot. Tables alone: no weights
    are copied here.

    When a tier is full, the adapter that was used longest ago leaves it, unless it is `kept`. RuntimeError where all
    are.

    memory      adapter id -> weights, the least recently used first
    slots       adapter id -> slot, the least recently used first
    pinned      ids of the adapters that keep their slot, and so their place in memory
    in_use      ids of the adapters that a step needs, which stay as well
    listeners   hear of every event; no decision depends on whether there are any
    make_cache  another one lets another adapter go, see `minivllm.policies.keeping`
    """

    def __init__(self, lora_config: LoRAConfig, make_cache: MakeCache = least_recently_used) -> None:
        self.capacity, self.lora_slots = lora_config.max_cpu_loras, lora_config.max_loras
        self.memory: LRUCache[LoRAModel] = make_cache(self.capacity, lambda i: self.memory.get(i))
        self.slots: LRUCache[int] = make_cache(self.lora_slots, lambda i: self.memory.get(i))
        self.pinned: set[int] = set()
        self.in_use: frozenset[int] = frozenset()
        self.listeners: list[Listener] = []
        self._claims = object()  # another one for every change of `in_use`

    @property
    def version(self) -> tuple[object, ...]:
        """Unlike all before once an adapter comes, goes, is replaced or used, in either tier, or `in_use` changes."""
        return self.memory.version, self.slots.version, self._claims

    @property
    def kept(self) -> frozenset[int]:
        """Adapters that nobody may evict or drop."""
        return self.in_use | self.pinned

    def set_in_use(self, adapter_ids: Iterable[int]) -> None:
        """From now on these adapters are in use, and no others."""
        in_use = frozenset(adapter_ids)
        if in_use != self.in_use:
            self.in_use = in_use
            self._claims = object()

    def tell(self, kind: str, adapter_id: int, slot: int | None = None, **more: object) -> None:
        """Tell the listeners of an event, given by the fields of `LoRAEvent`."""
        event = LoRAEvent(kind, adapter_id, slot, **more) if more else same_event(kind, adapter_id, slot)
        for listener in self.listeners:
            listener(event)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Inside, listeners hear of nothing: what a warm-up does with its adapters is not counted."""
        listeners, self.listeners = self.listeners, []
        try:
            yield
        finally:
            self.listeners = listeners

    def touch(self, adapter_id: int) -> None:
        """Mark as just used, wherever it is."""
        for tier in (self.memory, self.slots):
            if adapter_id in tier:
                tier.touch(adapter_id)

    def get_free_slots(self) -> list[int]:
        """Slots that no adapter is in."""
        return sorted(set(range(self.lora_slots)).difference(self.slots.values()))

    def has_room_for(self, adapter_id: int) -> bool:
        """Whether the adapter has a slot, or `find_slot` would find one."""
        in_slots = self.slots.keys()
        return adapter_id in in_slots or len(in_slots) < self.lora_slots or not in_slots <= self.kept

    # region lab 5.4: who has to go
    def make_room_in_memory(self) -> None:
        """When memory is full, what was used longest ago leaves it."""
        raise Todo("lab 5.4: who has to go")

    def remove_oldest_adapter(self) -> bool:
        """Drop the least recently used adapter that is not `kept` from memory. False when memory is empty.

        It leaves its slot, too: an id that is not in memory may come back with other weights. Listeners hear of a
        "drop" and, if it had a slot, of an "evict" from there (`tell`), in either order.
        """
        raise Todo("lab 5.4: who has to go")

    def find_slot(self) -> int:
        """The first free slot; if there is none, that of the active adapter used longest ago, which stays in memory.

        One that is `kept` is passed over. Listeners hear of an "evict" from that slot.
        """
        raise Todo("lab 5.4: who has to go")

    # endregion


class FullTiers(AdapterTiers):
    """Tiers that refuse an adapter when they are full, where others evict one."""

    def make_room_in_memory(self) -> None:
        """RuntimeError when memory is full."""
        if len(self.memory) >= self.capacity:
            raise RuntimeError(
                f"No free adapter slots: memory holds {len(self.memory)} adapters, as many as max_cpu_loras allows"
            )

    def find_slot(self) -> int:
        """A free slot; ValueError when there is none."""
        if not (free := self.get_free_slots()):
            raise ValueError(f"No free lora slots: they hold adapters {sorted(self.slots)}")
        return free[0]
