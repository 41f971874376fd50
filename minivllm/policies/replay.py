"""A sequence of uses and one tier of equal places: how often what is used is there. And the most that could be.

Nothing in vLLM (v0.22.1) looks back.
"""

import heapq
from collections.abc import Sequence

from minivllm.policies.keeping import KeepPolicy, PolicyCache


def hits(uses: Sequence[int], capacity: int, policy: KeepPolicy) -> int:
    """How many uses find their key in a tier of `capacity` places that begins empty, under a policy."""
    cache: PolicyCache[None] = PolicyCache(capacity, policy)
    found = 0
    for key in uses:
        found += key in cache
        cache.put(key, None)
    return found


def belady_hits(uses: Sequence[int], capacity: int) -> int:
    """The most that any policy finds: who is used again last goes. Belady, 1966; it knows what is to come."""
    next_uses = _next_uses(uses)
    held: dict[int, int] = {}  # key -> its next use
    farthest: list[tuple[int, int]] = []  # (-next use, key), also of what has changed since
    found = 0
    for place, key in enumerate(uses):
        found += key in held
        if key not in held and len(held) >= capacity:
            next_use, victim = heapq.heappop(farthest)
            while held.get(victim) != -next_use:
                next_use, victim = heapq.heappop(farthest)
            del held[victim]
        held[key] = next_uses[place]
        heapq.heappush(farthest, (-next_uses[place], key))
    return found


def _next_uses(uses: Sequence[int]) -> list[int]:
    """Of each use, the place of the next one of the same key; a place behind the end if there is none."""
    later: dict[int, int] = {}
    next_uses = [0] * len(uses)
    for place in range(len(uses) - 1, -1, -1):
        next_uses[place] = later.get(uses[place], len(uses) + place)
        later[uses[place]] = place
    return next_uses
