"""Open exercise of phase 05: which adapter leaves, so that few have to be read again."""

from collections.abc import Callable
from random import Random
from types import ModuleType

from labs.kit.judges import Refused

TITLE = "an eviction policy with fewer misses than LRU"
UNIT = "of LRU's misses beyond Belady's, by request"
BUDGET = 0.6

SLOTS = 16
ADAPTERS = 120
STEPS = 6000


def trace_of(rng: Random) -> list[int]:
    """Adapter ids by request: popular ones that drift, and now and then a sweep over ids that come once."""
    ids = rng.sample(range(1, 10_000), ADAPTERS)
    weights = [1 / (place + 1) ** 1.1 for place in range(ADAPTERS)]
    found: list[int] = []
    once = 10_000
    while len(found) < STEPS:
        found += rng.choices(ids, weights, k=rng.randint(60, 140))
        length = rng.randint(8, 24)
        found += range(once, once + length)
        once += length
        a, b = rng.randrange(SLOTS), rng.randrange(ADAPTERS)
        ids[a], ids[b] = ids[b], ids[a]
    return found[:STEPS]


def lru_misses(trace: list[int]) -> int:
    cached: dict[int, None] = {}
    misses = 0
    for adapter in trace:
        if adapter in cached:
            del cached[adapter]
        else:
            misses += 1
            if len(cached) == SLOTS:
                del cached[next(iter(cached))]
        cached[adapter] = None
    return misses


def belady_misses(trace: list[int]) -> int:
    """The fewest that are possible, by who looks ahead: what is asked for again last, leaves."""
    next_use, following = [0] * len(trace), dict.fromkeys(trace, len(trace))
    for index in range(len(trace) - 1, -1, -1):
        next_use[index] = following[trace[index]]
        following[trace[index]] = index
    cached: dict[int, int] = {}
    misses = 0
    for index, adapter in enumerate(trace):
        if adapter not in cached:
            misses += 1
            if len(cached) == SLOTS:
                del cached[max(cached, key=cached.get)]
        cached[adapter] = next_use[index]
    return misses


def policy_misses(policy: object, trace: list[int]) -> int:
    """Refused for a victim that is not there. The policy is told of each request when it comes, and of none before."""
    cached: set[int] = set()
    misses = 0
    for adapter in trace:
        if adapter not in cached:
            misses += 1
            if len(cached) == SLOTS:
                victim = policy.victim(tuple(sorted(cached)), adapter)
                if victim not in cached:
                    raise Refused(
                        f"victim() gave {victim!r}, which is not cached; cached are {sorted(cached)}"
                    )
                cached.remove(victim)
            cached.add(adapter)
        policy.used(adapter)
    return misses


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """(misses - Belady's) / (LRU's - Belady's): 1 is LRU, 0 is whoever knows the future."""
    policy = load().Policy(SLOTS)
    trace = trace_of(rng)
    best = belady_misses(trace)
    found = policy_misses(policy, trace)
    if found < best:
        raise Refused(f"{found} misses are fewer than the {best} of who knows the future")
    return (found - best) / (lru_misses(trace) - best)
