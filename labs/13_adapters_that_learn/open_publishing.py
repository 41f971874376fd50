"""Open exercise, phase 13: when to publish what a trainer has made. `lab open 13` judges it.

A trainer makes a version of an adapter every 200 to 900 ms, and requests of the adapter come in bursts, with pauses
between. To publish a version all requests stand still: for 15 ms, in which the weights are put into their slot, and
for 0.05 ms more for each token of each running request, whose keys and values are computed anew with the new weights.
The requests go on with these. To wait costs, too: an answer that ends with a version that is one behind the trainer's
counts as 200 ms, one that is two behind as 400 ms. Steps take 12 ms, and 24 requests run at a time.

Budget: at most 0.97 of what it costs to publish each third version. The cost is the milliseconds of all stalls, for
each request that runs or waits there, and those of all answers that are behind. An answer may be 6 versions behind at
most, or yours is refused. Traffic is made afresh for each judgement.
"""


class Policy:
    """Says when. This one publishes each version as soon as there is one."""

    def publish(self, now: float, behind: int, running: list[tuple[int, int]], waiting: int) -> bool:
        """Whether to publish the newest version now. Asked before each step in which there is one to publish.

        now       ms
        behind    versions that the trainer has made since the one that serves
        running   of each running request: (tokens that would be computed anew, tokens that it has still to answer)
        waiting   requests that do not run yet
        """
        return True
