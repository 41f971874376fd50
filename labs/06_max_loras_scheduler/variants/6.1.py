def begin_step(self, running: Iterable[int], pinned: Iterable[int]) -> None:
    self.pinned = set(pinned)
    self.num_running = Counter()
    for adapter_id in running:
        if adapter_id != 0:
            self.num_running[adapter_id] += 1
    self.taken = self.pinned.union(self.num_running.keys())

def fits(self, adapter_id: int) -> bool:
    if adapter_id == 0 or adapter_id in self.taken:
        return True
    return len(self.taken) < self.max_loras

def take(self, adapter_id: int) -> None:
    if adapter_id == 0:
        return
    self.taken.add(adapter_id)

def never_fits(self, adapter_id: int) -> bool:
    if adapter_id == 0 or adapter_id in self.pinned:
        return False
    return len(self.pinned) >= self.max_loras
