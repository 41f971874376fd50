def touch(self, key: int) -> None:
    self._entries.move_to_end(key)

def put(self, key: int, value: V, spare: Collection[int] = ()) -> None:
    is_full = len(self._entries) >= self.capacity
    if is_full and key not in self._entries:
        self.remove_oldest(spare)
    self._entries[key] = value
    self.touch(key)

def remove_oldest(self, spare: Collection[int] = ()) -> tuple[int, V]:
    for key in self._entries:
        if key in self._pinned or key in spare:
            continue
        return key, self._entries.pop(key)
    raise RuntimeError(f"cannot remove any of {list(self._entries)}: all are pinned or in {sorted(spare)}")
