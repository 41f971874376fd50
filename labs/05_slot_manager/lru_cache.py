"""A cache that forgets what was used longest ago. Stands for vllm/utils/cache.py (v0.22.1)."""

from minivllm.labs import Todo
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """At most `capacity` values by key, in the order of their last use; pinned ones are never forgotten.

    vLLM: `LRUCache`. There, a callback runs when an entry leaves; here, `remove_oldest` returns what it removed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[int, V] = OrderedDict()  # the least recently used first
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
        """A copy of the pinned keys."""
        return set(self._pinned)

    def get(self, key: int) -> V | None:
        """The value, which now counts as just used; None for an unknown key."""
        if key in self._entries:
            self.touch(key)
        return self.peek(key)

    def peek(self, key: int) -> V | None:
        """The value, with the order left as it was; None for an unknown key."""
        return self._entries.get(key)

    # region lab 5.1: use, and forget what was used longest ago
    def touch(self, key: int) -> None:
        """Mark as just used. KeyError for an unknown key."""
        raise Todo("lab 5.1: use, and forget what was used longest ago")

    def put(self, key: int, value: V, spare: Collection[int] = ()) -> None:
        """Add, or replace and keep a pin; either way just used. If full, the oldest is forgotten first.

        RuntimeError, and nothing has changed, when every entry is pinned or in `spare`.
        """
        raise Todo("lab 5.1: use, and forget what was used longest ago")

    def remove_oldest(self, spare: Collection[int] = ()) -> tuple[int, V]:
        """Forget the least recently used entry that is neither pinned nor in `spare`; returns key and value.

        RuntimeError when there is none.
        """
        raise Todo("lab 5.1: use, and forget what was used longest ago")

    # endregion

    def pin(self, key: int) -> None:
        """Keep until it is unpinned or popped. ValueError for an unknown key."""
        if key not in self._entries:
            raise ValueError(f"Cannot pin key: {key} not in cache.")
        self._pinned.add(key)

    def unpin(self, key: int) -> None:
        """Let it be forgotten again; nothing to do for a key that is not pinned."""
        self._pinned.discard(key)

    def pop(self, key: int) -> V | None:
        """Remove, pinned or not, and return the value; None for an unknown key."""
        self._pinned.discard(key)
        return self._entries.pop(key, None)
