"""Open exercise of phase 06: whose adapter has a slot in a step, so that nobody stalls and little is lost."""

from collections import deque
from collections.abc import Callable
from random import Random
from types import ModuleType

from labs.kit.judges import Refused

TITLE = "turns in few slots: short stalls at 90 % of the tokens"
UNIT = "steps of the longest stall"
BUDGET = 15.0
SHARE = 0.9  # of the tokens that whoever never cares for stalls gets done

SLOTS = 4
ADAPTERS = 9
ROWS = 16
STEPS = 500

Arrivals = list[list[tuple[int, int]]]  # of each step: (adapter, tokens of the answer)


def arrivals_of(rng: Random) -> Arrivals:
    """Three adapters that always have work, and others that now and then have some."""
    ids = rng.sample(range(1, 1000), ADAPTERS)
    weights = [6, 5, 4] + [1] * (ADAPTERS - 3)
    return [[(rng.choices(ids, weights)[0], rng.randint(6, 24))] for _ in range(STEPS)]


def serve(choose: Callable[..., object], arrivals: Arrivals) -> tuple[int, int]:
    """(tokens done, the longest stall in steps) of a policy.

    A step gives one token to each of at most ROWS requests, the oldest first, of adapters that have a slot and had
    it in the step before: the first step of an adapter goes into its copy. A stall is a run of steps in which an
    adapter with unfinished requests gets no token.
    """
    queues: dict[int, deque[list[int]]] = {}  # adapter -> [arrival, tokens left]
    held: dict[int, int] = {}
    stalls: dict[int, int] = {}
    tokens = longest = order = 0
    for coming in arrivals:
        for adapter, length in coming:
            queues.setdefault(adapter, deque()).append([order, length])
            order += 1
        wanted = _slots(choose, queues, held, stalls)
        held = {adapter: held.get(adapter, -1) + 1 for adapter in wanted}
        ready = sorted((request, a) for a in held if held[a] for request in queues.get(a, ()))[:ROWS]
        served = {adapter for _, adapter in ready}
        for request, _ in ready:
            request[1] -= 1
        tokens += len(ready)
        queues = {a: left for a, q in queues.items() if (left := deque(r for r in q if r[1]))}
        stalls = {a: 0 if a in served else stalls.get(a, 0) + 1 for a in queues}
        longest = max(longest, *stalls.values(), 0)
    return tokens, longest


def _slots(choose: Callable[..., object], queues: dict, held: dict, stalls: dict) -> list[int]:
    """What a policy says, or Refused. It gets copies: what it changes in them changes nothing here."""
    counts = {adapter: len(queue) for adapter, queue in queues.items()}
    wanted = list(dict.fromkeys(choose(dict(held), counts, {a: stalls.get(a, 0) for a in queues})))
    unknown = [adapter for adapter in wanted if adapter not in counts and adapter not in held]
    if len(wanted) > SLOTS or unknown:
        raise Refused(f"choose() gave {wanted}: at most {SLOTS} adapters, each with requests or with a slot")
    return wanted


def never_in_turns(held: dict[int, int], waiting: dict[int, int], stalled: dict[int, int]) -> list[int]:
    """Whoever has a slot keeps it while there is work; free ones go to the longest queue. What throughput likes."""
    keep = [adapter for adapter in held if adapter in waiting]
    others = sorted((a for a in waiting if a not in keep), key=waiting.get, reverse=True)
    return (keep + others)[:SLOTS]


def judge(load: Callable[[], ModuleType], rng: Random) -> float:
    """The longest stall; Refused where too few tokens are done."""
    policy = load().Policy(SLOTS)
    arrivals = arrivals_of(rng)
    most, _ = serve(never_in_turns, arrivals)
    tokens, longest = serve(policy.choose, arrivals)
    if tokens < SHARE * most:
        raise Refused(
            f"{tokens} tokens in {STEPS} steps are {tokens / most:.1%} of {most}; {SHARE:.0%} are asked for"
        )
    return longest
