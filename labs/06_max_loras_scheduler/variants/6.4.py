def make_room(self, waiting: Iterable[int]) -> list[int]:
    evicted = []
    while len(self.taken) > self.max_loras:
        victim = self._victim(min_held=0)
        if victim is None:
            break
        evicted.append(self._evict(victim))
    for adapter_id in waiting:
        if self.waited(adapter_id) < self.max_wait_steps:
            return evicted
        if not self.fits(adapter_id):
            victim = self._victim(min_held=self.max_wait_steps)
            if victim is None:
                return evicted
            evicted.append(self._evict(victim))
        self.take(adapter_id)
    return evicted
