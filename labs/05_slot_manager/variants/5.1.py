def touch(self, key: int) -> None:
    self.move_to_end(key)

def put(self, key: int, value: V, spare: Collection[int] = ()) -> None:
    is_full = len(self) >= self.capacity
    if is_full and key not in self:
        self.remove_oldest(spare)
    self[key] = value
    self.touch(key)

def remove_oldest(self, spare: Collection[int] = ()) -> tuple[int, V]:
    for key in self:
        if key in spare:
            continue
        return key, self.pop(key)
    raise RuntimeError(f"cannot remove any of {list(self)}: {sorted(spare)} must stay")
