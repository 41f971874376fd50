"""A cache that forgets what was used longest ago. Stands for vllm/utils/cache.py (v0.22.1)."""

from labs.kit.overlay import Todo
from collections import OrderedDict
from collections.abc import Collection
from typing import TypeVar

V = TypeVar("V")


class LRUCache(OrderedDict[int, V]):
    """At most `capacity` values by key, the least recently used first. vLLM: `LRUCache`.

    `put` and `touch` count as uses, and looking does not. vLLM's has pins; here the caller that makes room says which
    keys must stay. There, a callback runs when an entry leaves; here, `remove_oldest` returns what it removed.

    version   an object that is replaced by a new one at every change, one of the order too: while it is the same
              object, nothing has changed
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.version = capacity, object()

    def __setitem__(self, key: int, value: V) -> None:
        self.version = object()
        super().__setitem__(key, value)

    def __delitem__(self, key: int) -> None:
        self.version = object()
        super().__delitem__(key)

    def pop(self, key: int, *default: V) -> V:
        self.version = object()
        return super().pop(key, *default)

    def move_to_end(self, key: int, last: bool = True) -> None:
        self.version = object()
        super().move_to_end(key, last)

    # region lab 5.1: use, and forget what was used longest ago
    def touch(self, key: int) -> None:
        """Mark as just used. KeyError for an unknown key."""
        raise Todo("lab 5.1: use, and forget what was used longest ago")

    def put(self, key: int, value: V, spare: Collection[int] = ()) -> None:
        """Add or replace, which is a use. There are never more than `capacity` entries.

        RuntimeError, and nothing has changed, when there is no room and none may be made.
        """
        raise Todo("lab 5.1: use, and forget what was used longest ago")

    def remove_oldest(self, spare: Collection[int] = ()) -> tuple[int, V]:
        """Forget the least recently used entry that is not in `spare`; returns key and value.

        RuntimeError, which names those in `spare`, when there is none.
        """
        raise Todo("lab 5.1: use, and forget what was used longest ago")

    # endregion
