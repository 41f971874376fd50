"""Open exercise, phase 06: turns as short as they can be; one slot changes hands a step.

Who stalls takes the slot of the shortest queue that had its turn: the copy of one slot costs few of 16 rows, while the
long queues, which fill the batch, keep theirs.
"""

PATIENCE = 3
TURN = 2


class Policy:
    """Turns of at least `TURN` steps beside the copy."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def choose(self, held: dict[int, int], waiting: dict[int, int], stalled: dict[int, int]) -> list[int]:
        """Those who have stalled longest take what is free, and one slot of whoever had a turn."""
        keep = [adapter for adapter in held if adapter in waiting]
        others = sorted((a for a in waiting if a not in held), key=stalled.get, reverse=True)
        if len(keep) == self.slots and others and stalled[others[0]] >= PATIENCE:
            had_a_turn = [a for a in keep if held[a] >= TURN and not stalled[a]]
            if had_a_turn:
                keep.remove(min(had_a_turn, key=waiting.get))
        return (keep + others)[: self.slots]
