"""A model of the two tiers in plain lists, a clock instead of linked orders, and weights that are only names."""


class TwoTiers:
    """What the managers should do, as slowly and plainly as it can be said.

    memory   adapter id -> its weights (any object)
    used     adapter id -> when it was last used; the smallest goes first
    slots    adapter id or None, by slot
    """

    def __init__(self, num_slots, capacity, evicts=True):
        self.capacity = capacity
        self.evicts = evicts
        self.memory, self.used = {}, {}
        self.slots = [None] * num_slots
        self.pins, self.in_use = set(), set()
        self.copy_fails = False
        self.clock = self.evictions = self.drops = self.copies = 0

    def by_use(self, ids):
        return sorted(ids, key=lambda adapter_id: self.used[adapter_id])

    def active(self):
        return [adapter_id for adapter_id in self.slots if adapter_id is not None]

    def touch(self, adapter_id):
        if adapter_id in self.memory:
            self.clock += 1
            self.used[adapter_id] = self.clock

    def victim(self, ids):
        movable = [adapter_id for adapter_id in self.by_use(ids) if adapter_id not in self.pins | self.in_use]
        if not movable:
            raise RuntimeError
        return movable[0]

    def add(self, adapter_id, weights):
        if adapter_id in self.memory:
            self.touch(adapter_id)
            return False
        if len(self.memory) == self.capacity:
            if not self.evicts:
                raise RuntimeError
            self.remove_oldest()
        self.memory[adapter_id] = weights
        self.touch(adapter_id)
        return True

    def remove_oldest(self):
        if not self.memory:
            return False
        victim = self.victim(self.memory)
        self.evictions += victim in self.slots
        self.drops += 1
        return self.remove(victim)

    def remove(self, adapter_id):
        self.deactivate(adapter_id)
        return self.memory.pop(adapter_id, None) is not None

    def activate(self, adapter_id):
        if adapter_id in self.slots:
            self.touch(adapter_id)
            return False
        if adapter_id not in self.memory:
            raise ValueError
        if None not in self.slots:
            if not self.evicts:
                raise ValueError
            self.deactivate(self.victim(self.active()))
            self.evictions += 1
        if self.copy_fails:
            raise OSError
        self.slots[self.slots.index(None)] = adapter_id
        self.copies += 1
        self.touch(adapter_id)
        return True

    def deactivate(self, adapter_id):
        self.pins.discard(adapter_id)
        if adapter_id not in self.slots:
            return False
        self.slots[self.slots.index(adapter_id)] = None
        return True

    def pin(self, adapter_id):
        self.activate(adapter_id)
        self.pins.add(adapter_id)
        return True

    def unpin(self, adapter_id):
        was_pinned = adapter_id in self.pins
        self.pins.discard(adapter_id)
        return was_pinned

    def replace(self, adapter_id, weights):
        if adapter_id not in self.memory:
            raise ValueError
        pinned = adapter_id in self.pins
        active = self.deactivate(adapter_id)
        self.memory[adapter_id] = weights
        self.touch(adapter_id)
        if active:
            self.activate(adapter_id)
        if pinned:
            self.pin(adapter_id)

    def serve(self, wanted, weights_of):
        """One step: none of its adapters may go, each is read if it is missing, then has a slot."""
        if len(set(wanted) | self.pins) > len(self.slots):
            raise RuntimeError
        self.in_use = set(wanted)
        for adapter_id in sorted(wanted):
            if adapter_id not in self.memory:
                self.add(adapter_id, weights_of(adapter_id))
            self.activate(adapter_id)
