"""Open exercise, phase 06: turns in few slots. `lab open 6` judges it.

4 slots, 9 adapters, of which three always have work. A step gives a token to each of at most 16 requests, the oldest
first, whose adapters have slots. The step in which an adapter comes into a slot gives it none: its weights are copied.
A stall is a run of steps in which an adapter with unfinished requests gets no token. Arrivals are made afresh.

Budget: no stall longer than 15 steps, with at least 90 % of the tokens that this answer gets done.
"""


class Policy:
    """Who has a slot. This one never takes a slot from an adapter with work."""

    def __init__(self, slots: int) -> None:
        """slots: how many there are"""
        self.slots = slots

    def choose(self, held: dict[int, int], waiting: dict[int, int], stalled: dict[int, int]) -> list[int]:
        """The adapters that have slots in the coming step, at most `slots`.

        held     adapter -> steps since it came into its slot
        waiting  adapter -> its unfinished requests, those being served among them
        stalled  adapter -> steps it has got no token; an adapter for each in `waiting`
        """
        keep = [adapter for adapter in held if adapter in waiting]
        others = sorted((a for a in waiting if a not in keep), key=waiting.get, reverse=True)
        return (keep + others)[: self.slots]
