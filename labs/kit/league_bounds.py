"""The least mean time to first token that any policies can have, on the simulator's fleet.

Two bounds, of which the larger holds. Alone: each request has an engine for itself, and its adapter is in a slot.
Shared: all engines are one machine that computes as many tokens a second as their best steps do, which serves whoever
has least left (SRPT; Schrage, 1968: no order has a smaller mean). Nothing is read or copied, and answers cost nothing.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from minivllm.simulate.cost_model import CostModel, StepWork
from minivllm.simulate.traffic import Arrival


def least_ttft(arrivals: Sequence[Arrival], cost: CostModel, engines: int, rows: int, tokens: int) -> float:
    """Seconds, of the mean. All arrivals want adapters, and are in the order of their times.

    rows, tokens   the most of a step (`max_num_seqs`, `max_num_batched_tokens`)
    """
    work = new_tokens(arrivals)
    alone = float(least_alone(step_floor(cost, 1, tokens), max(work))[work].mean()) + cost.launch_s
    floor = step_floor(cost, rows, tokens)
    speed = engines * max(n / floor[n] for n in range(1, tokens + 1))
    return max(alone, least_flow([arrival.time_s for arrival in arrivals], work, speed) / len(work))


def step_floor(cost: CostModel, rows: int, tokens: int) -> list[float]:
    """floor[n]: the least seconds of a step of n tokens or more. Up to `rows` tokens it may have no prompt."""
    works = (StepWork(1, float(n > rows), tokens=n, lora=1, adapters=1) for n in range(tokens + 1))
    floor = [cost.step_seconds(work) for work in works]
    for n in range(tokens - 1, -1, -1):
        floor[n] = min(floor[n], floor[n + 1])
    return floor


def new_tokens(arrivals: Sequence[Arrival]) -> list[int]:
    """Of each prompt the tokens that no earlier request of its session has: a prefix cache may have the others.

    The last token of a prompt is always computed.
    """
    said: dict[int, int] = {}
    new = []
    for arrival in arrivals:
        before = said.get(arrival.session, 0) if arrival.session is not None else 0
        new.append(max(1, arrival.prompt_tokens - before))
        if arrival.session is not None:
            said[arrival.session] = max(before, arrival.prompt_tokens + arrival.output_tokens)
    return new


def least_alone(floor: Sequence[float], most: int) -> np.ndarray:
    """(most + 1,) the least seconds of steps that compute so many tokens, by the best split into steps."""
    of_step, least = np.asarray(floor[1:]), np.zeros(most + 1)
    for n in range(1, most + 1):
        last = min(n, len(of_step))  # the most tokens of the last step; those before it took their least
        least[n] = (of_step[:last] + least[n - last : n][::-1]).min()
    return least


def least_flow(times: Sequence[float], work: Sequence[float], speed: float) -> float:
    """The least sum of seconds from arrival to end, on a machine of `speed`: shortest remaining work first."""
    left: list[tuple[float, float]] = []  # (work that remains, arrival)
    now = total = 0.0
    for time, new in [*zip(times, work), (float("inf"), 0)]:
        while left and now + left[0][0] / speed <= time:
            rest, came = heapq.heappop(left)
            now += rest / speed
            total += now - came
        if left:
            rest, came = left[0]
            heapq.heapreplace(left, (rest - (time - now) * speed, came))
        now = time
        heapq.heappush(left, (new, time))
    return total
