"""Open exercise, phase 10: who is kept, by what it costs to bring back. `lab open 10` judges it.

An engine has 32 adapters in memory and 8 in slots. Some 300 keep coming back, by a popularity that drifts. For a while
one of them is hot, and now and then there is a sweep over some that come once. Ranks are 8 to 64, and time goes with
the rank: 2.6 ms to read and 0.12 ms to copy for each. Each tier has a policy of its own. Both hear of every request.

Budget: at most 0.95 of the milliseconds that GDSF has beyond the least that is possible. GDSF is 1, and 0 is who knows
the future. Traffic is made afresh for each judgement.

The interface is the engine's own. A file with `minivllm.policies.keeping.POLICIES["mine"] = Policy` adds yours:
`minivllm simulate --policy-file FILE --eviction-policy lru,gdsf,mine` tries it on other traffic. There, each step that
an adapter runs in is a use of it.
"""

from collections.abc import Callable, Sequence


class Policy:
    """Who leaves a full tier. This one is LRU: whoever was used longest ago."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        """cost: adapter -> milliseconds to bring it back into this tier"""
        self.cost = cost

    def used(self, adapter: int) -> None:
        """It has come in, or was used again."""

    def left(self, adapter: int) -> None:
        """It is gone, on whosever order: what leaves memory leaves its slot as well."""

    def victim(self, candidates: Sequence[int]) -> int:
        """Which of these leaves, since all places are taken. The least recently used is first."""
        return candidates[0]
