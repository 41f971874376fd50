"""What a stall takes from each request is weighed with what a fresher version gives to each.

Both are paid by all that are there, so their number does not matter: few tokens to compute anew make a good moment.
"""

SWAP, PREFILL, STALE, MOST = 15.0, 0.05, 200.0, 6
WORTH = 0.4  # of the staleness that a publication ends: the next version comes soon


class Policy:
    """As soon as the stall is shorter than a part of what answers are behind."""

    def publish(self, now: float, behind: int, running: list[tuple[int, int]], waiting: int) -> bool:
        stall = SWAP + PREFILL * sum(tokens for tokens, _ in running)
        return behind >= MOST or STALE * behind * WORTH >= stall
