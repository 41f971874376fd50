"""Only answers that end before the next publication gain by this one, and all that are there pay for it.

So a request counts the more, the fewer tokens it has still to answer. One that waits counts a little. Nobody pays for a
publication while nobody runs.
"""

SWAP, PREFILL, STALE, MOST = 15.0, 0.05, 200.0, 6
WORTH = 0.8  # of the staleness of an answer that ends at once
HALF = 40  # tokens that an answer lacks which counts half as much
WAITS = 0.3  # what a request that waits counts


class Policy:
    """As soon as those who gain would gain more than all of them lose."""

    def publish(self, now: float, behind: int, running: list[tuple[int, int]], waiting: int) -> bool:
        if behind >= MOST or not running:
            return True
        stall = SWAP + PREFILL * sum(tokens for tokens, _ in running)
        gaining = sum(HALF / (HALF + left) for _, left in running) + WAITS * waiting
        return STALE * behind * WORTH * gaining >= stall * (len(running) + waiting)
