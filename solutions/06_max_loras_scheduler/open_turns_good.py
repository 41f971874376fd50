"""Open exercise, phase 06: a bounded wait, as the engine has it, and one change of hands a step.

Who has stalled for some steps takes the slot of the shortest queue that had its turn. Were all who are due to come in
at once, their copies would empty the same step; were the longest queues to leave, rows would stay empty.
"""

PATIENCE = 4
TURN = 3


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
