def _make_room_in_memory(self) -> None:
    if len(self) < self.capacity:
        return
    self.remove_oldest_adapter()

def remove_oldest_adapter(self) -> bool:
    if len(self) == 0:
        return False
    victim = self._registered_adapters.remove_oldest(spare=self.kept)[0]
    slot = None
    if victim in self._active_adapters:
        slot = self._active_adapters.pop(victim)
    if slot is not None:
        self.tell("evict", victim, slot)
    self.tell("drop", victim)
    return True

def _find_slot(self) -> int:
    free = self.get_free_slots()
    if free:
        return free[0]
    victim, slot = self._active_adapters.remove_oldest(spare=self.kept)
    self.tell("evict", victim, slot)
    return slot
