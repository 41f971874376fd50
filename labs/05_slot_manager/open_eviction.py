"""Open exercise, phase 05: an eviction policy. `lab open 5` judges it.

16 slots, about 120 adapters that keep coming back, and now and then a sweep over adapters that come once. A policy sees
each request when it comes and decides who leaves when all slots are taken. Misses are counted on traces made afresh.

Budget: at most 0.6 of the misses that LRU has beyond Belady's. Belady knows the future: that is 0. LRU is 1.
What is popular changes slowly. What comes once never comes again.
"""


class Policy:
    """Which adapter leaves. This one is LRU: whoever was used longest ago."""

    def __init__(self, slots: int) -> None:
        """slots: how many adapters fit at a time"""
        self.last_used: dict[int, None] = {}

    def used(self, adapter: int) -> None:
        """Called for every request, hit or miss, when its adapter is in a slot."""
        self.last_used.pop(adapter, None)
        self.last_used[adapter] = None

    def victim(self, cached: tuple[int, ...], wanted: int) -> int:
        """The adapter that leaves, one of `cached`: all slots are taken, and `wanted` comes in."""
        there = set(cached)
        return next(adapter for adapter in self.last_used if adapter in there)
