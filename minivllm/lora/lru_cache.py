"""A cache that forgets what was used longest ago. Stands for vllm/utils/cache.py (v0.22.1)."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """At most `capacity` values by key, oldest use first; pinned ones are never forgotten. vLLM: `LRUCache`.

    on_remove   called with (key, value) after an entry has left, however it left
    """

    def __init__(self, capacity: int, on_remove: Callable[[int, V], object] | None = None) -> None:
        self.capacity = capacity
        self._on_remove = on_remove
        self._entries: OrderedDict[int, V] = OrderedDict()
        self._pinned: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[int]:
        """Keys, the least recently used first."""
        return iter(self._entries)

    @property
    def cache(self) -> dict[int, V]:
        """A copy, the least recently used first."""
        return dict(self._entries)

    @property
    def pinned_items(self) -> set[int]:
        return set(self._pinned)

    def get(self, key: int, default: V | None = None) -> V | None:
        """The value, which now counts as just used."""
        if key not in self._entries:
            return default
        self.touch(key)
        return self._entries[key]

    def peek(self, key: int) -> V | None:
        """The value, with the order as it was."""
        return self._entries.get(key)

    def __setitem__(self, key: int, value: V) -> None:
        self.put(key, value)

    # region lab 5.1: touch, pin and forget the oldest
    def touch(self, key: int) -> None:
        """Mark as just used. KeyError for an unknown key."""
        self._entries.move_to_end(key)

    def put(self, key: int, value: V, spare: Collection[int] = ()) -> None:
        """Add or replace, as just used; where that would be one too many, the oldest goes first.

        RuntimeError, and nothing changed, when every entry is pinned or spared.
        """
        if key not in self._entries and len(self._entries) >= self.capacity:
            self.remove_oldest(spare)
        self._entries[key] = value
        self._entries.move_to_end(key)

    def remove_oldest(self, spare: Collection[int] = ()) -> int:
        """Forget the least recently used entry that is neither pinned nor in `spare`, and return its key."""
        victim = next((key for key in self._entries if key not in self._pinned and key not in spare), None)
        if victim is None:
            raise RuntimeError(
                "All items are pinned or in use, cannot remove oldest from the cache: "
                f"pinned {sorted(self._pinned)}, in use {sorted(spare)}"
            )
        self.pop(victim)
        return victim

    def pin(self, key: int) -> None:
        """Keep until unpinned or popped. ValueError for an unknown key."""
        if key not in self._entries:
            raise ValueError(f"Cannot pin key: {key} not in cache.")
        self._pinned.add(key)

    # endregion

    def unpin(self, key: int) -> None:
        self._pinned.discard(key)

    def pop(self, key: int, default: V | None = None) -> V | None:
        """Remove, pinned or not; `default` for an unknown key."""
        if key not in self._entries:
            return default
        value = self._entries.pop(key)
        self._pinned.discard(key)
        if self._on_remove is not None:
            self._on_remove(key, value)
        return value

    def clear(self) -> None:
        for key in list(self._entries):
            self.pop(key)
