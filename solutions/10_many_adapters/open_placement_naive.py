"""Open exercise, phase 10: on which engines each adapter is placed, by demand. `lab open placement` judges it.

Four engines stand behind one server, as in `lab open 11`: each serves a request at a time, for 40 ms, and reads an
adapter that it lacks first, 2.6 ms for each rank. Its memory has room for 320 ranks of the 1,200 that all 40 adapters
have together, and forgets the least recently used. Requests come every 16 ms on average. Popularity drifts, and at
times one adapter is hot: more requests want it than one engine can serve.

Here you do not see single requests. Every 2 seconds you say on which engines each adapter is placed. Until then each
of its requests goes to the one of these that has the fewest. One engine each is too few for a hot adapter. All engines
for everybody evict each other's adapters. Who follows every whim of the demand reads all the time, since an adapter
that moves is read again where it comes to.

Budget: at most 0.4 of the seconds that the answer below has beyond the least that is possible, from the moment at
which a request comes to its end. 0 has nothing to read and one queue for all engines. Traffic is made afresh for each
judgement.
"""

from collections.abc import Mapping, Sequence


class Policy:
    """Who is where. Here every adapter has one engine, for ever."""

    def __init__(self, ranks: Mapping[int, int], engines: int, memory: int) -> None:
        """ranks: of each adapter; engines: how many; memory: ranks that one has room for"""
        self.home = {adapter: [n % engines] for n, adapter in enumerate(sorted(ranks))}

    def place(
        self, now: float, counts: Mapping[int, int], placed: Mapping[int, Sequence[int]]
    ) -> Mapping[int, Sequence[int]]:
        """Each adapter's engines, at least one of 0 to `engines` - 1.

        now      milliseconds: 0 at first, and every 2,000 from then on
        counts   adapter -> requests since the last time
        placed   what was said then; empty at first
        """
        return self.home
