"""Traffic to simulate: times, lengths and adapters of requests. The same for the same arguments and seed."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np

TRACES = ("azure-2023-conv", "azure-2023-code")


@dataclass(frozen=True)
class Arrival:
    """One request to come.

    time_s    after the start
    adapter   number of its adapter, 0 the most popular; None = base
    session   requests of one session begin with the same tokens: the longer prompt has the shorter one in it
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: int | None
    session: int | None = None


def check_arrival(arrival: Arrival, adapters: int) -> None:
    """ValueError for a request that no engine takes.   adapters: how many there are"""
    if arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
        raise ValueError(
            f"a request needs at least one token of prompt and one of output, got {arrival.prompt_tokens} and "
            f"{arrival.output_tokens}; leave it out"
        )
    if arrival.adapter is not None and not 0 <= arrival.adapter < adapters:
        raise ValueError(f"there is no adapter {arrival.adapter}; there are {adapters}, from 0")


@dataclass(frozen=True)
class Lengths:
    """Token counts: log-normal around a median, rounded, and clipped to low..high."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), self.low, self.high).astype(int).tolist()


# Times of arrival.


def poisson(count: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """(count,) seconds of arrivals: independent of each other, `rate` a second."""
    return rng.exponential(1 / rate, count).cumsum()


def bursts(
    count: int, rate: float, rng: np.random.Generator, size: float = 20, speed: float = 10
) -> np.ndarray:
    """(count,) seconds: bursts of about `size` requests that come `speed` times as fast; the mean rate is `rate`."""
    first = rng.random(count) < 1 / size
    gaps = rng.exponential(1 / (speed * rate), count)
    quiet = size * (1 / rate - 1 / (speed * rate))  # what is left of the mean, before each burst
    return (gaps + first * rng.exponential(quiet, count)).cumsum()


def diurnal(
    count: int, rate: float, rng: np.random.Generator, period_s: float | None = None, depth: float = 0.8
) -> np.ndarray:
    """(count,) seconds: a Poisson process whose rate swings by `depth` of itself, once in `period_s` or in all."""
    end = count / rate
    period_s = period_s or end
    grid = np.linspace(0, 2 * end, 20_001)
    swing = depth * period_s / (2 * np.pi) * (1 - np.cos(2 * np.pi * grid / period_s))
    expected = rate * (grid + swing)  # arrivals until then: the integral of the rate
    return np.interp(rng.exponential(1, count).cumsum(), expected, grid)


# Adapters.


def zipf_shares(count: int, alpha: float) -> np.ndarray:
    """(count,) shares that sum to 1, the i-th in proportion to (i + 1) ** -alpha; alpha 0 = all alike."""
    weights = np.arange(1, count + 1, dtype=float) ** -alpha
    return weights / weights.sum()


def by_zipf(times: np.ndarray, adapters: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """The adapter of each arrival, by popularity alone."""
    return rng.choice(adapters, len(times), p=zipf_shares(adapters, alpha))


def by_bursts(
    times: np.ndarray, adapters: int, alpha: float, rng: np.random.Generator, hot_s: float = 120
) -> np.ndarray:
    """As `by_zipf`, but half of the requests of each `hot_s` seconds want one adapter, any of them, that is hot."""
    picks = by_zipf(times, adapters, alpha, rng)
    spans = (times // hot_s).astype(int)
    hot = rng.integers(adapters, size=spans[-1] + 1 if len(spans) else 0)
    return np.where(rng.random(len(times)) < 0.5, hot[spans], picks)


def by_tenant(
    times: np.ndarray, adapters: int, alpha: float, rng: np.random.Generator, tenants: int = 8
) -> np.ndarray:
    """Tenants by Zipf, each with its own share of the adapters, which it uses alike."""
    own = np.array_split(rng.permutation(adapters), min(tenants, adapters))
    picks = by_zipf(times, len(own), alpha, rng)
    draws = rng.random(len(times))
    return np.array([own[tenant][int(draw * len(own[tenant]))] for tenant, draw in zip(picks, draws)], int)


def by_hotspot(
    times: np.ndarray, adapters: int, alpha: float, rng: np.random.Generator, heat: float = 0.6
) -> np.ndarray:
    """As `by_zipf`, but one adapter, any of them, gets `heat` of all requests: more than one engine can serve."""
    picks = by_zipf(times, adapters, alpha, rng)
    return np.where(rng.random(len(times)) < heat, rng.integers(adapters), picks)


def by_thrash(
    times: np.ndarray, adapters: int, alpha: float, rng: np.random.Generator, strays: float = 0.2
) -> np.ndarray:
    """All adapters round and round in one order, but for `strays` of the requests, which want any, all alike.

    A tier of fewer places that evicts the least recently used always evicts what is wanted next. `alpha` is not used.
    """
    rounds = rng.permutation(adapters)[np.arange(len(times)) % adapters]
    return np.where(rng.random(len(times)) < strays, rng.integers(adapters, size=len(times)), rounds)


def by_long_tail(
    times: np.ndarray, adapters: int, alpha: float, rng: np.random.Generator, head: float = 0.05
) -> np.ndarray:
    """Half of the requests want the `head` of all adapters, by Zipf, and half any of the others, all alike."""
    popular = max(1, min(adapters - 1, round(head * adapters)))
    picks, others = by_zipf(times, popular, alpha, rng), rng.integers(popular, max(adapters, 2), len(times))
    return np.where(rng.random(len(times)) < 0.5, picks, others % adapters)


TIMES: dict[str, Callable[..., np.ndarray]] = {"poisson": poisson, "bursts": bursts, "diurnal": diurnal}
ADAPTERS: dict[str, Callable[..., np.ndarray]] = {
    "zipf": by_zipf,
    "bursts": by_bursts,
    "tenants": by_tenant,
    "hotspot": by_hotspot,
    "thrash": by_thrash,
    "long-tail": by_long_tail,
}


# Whole traffic.


def make_traffic(
    requests: int, rate: float, adapters: int, alpha: float, prompt: Lengths, output: Lengths, seed: int = 0
) -> list[Arrival]:
    """A Poisson process of `rate` requests a second, with adapters by Zipf."""
    rng = np.random.default_rng(seed)
    times = poisson(requests, rate, rng)
    prompts, outputs = prompt.draw(requests, rng), output.draw(requests, rng)
    picks = by_zipf(times, adapters, alpha, rng)
    return [Arrival(*each) for each in zip(times.tolist(), prompts, outputs, picks.tolist())]


def read_trace(name: str) -> list[Arrival]:
    """A real trace that the package brings, of the base model. ValueError for an unknown one."""
    if name not in TRACES:
        raise ValueError(f"there is no trace '{name}'; known are {', '.join(TRACES)}")
    with (files(__package__) / "traces" / f"{name}.csv").open(encoding="utf-8") as lines:
        return [
            Arrival(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]), None)
            for row in csv.DictReader(lines)
        ]


def repeated(trace: Sequence[Arrival], count: int, rate: float | None = None) -> list[Arrival]:
    """`count` arrivals: the trace again and again, its times stretched to a mean of `rate` requests a second."""
    own_rate = (len(trace) - 1) / trace[-1].time_s
    stretch = own_rate / rate if rate else 1.0
    around = trace[-1].time_s + 1 / own_rate
    return [
        replace(one, time_s=stretch * (n // len(trace) * around + one.time_s))
        for n, one in ((n, trace[n % len(trace)]) for n in range(count))
    ]


def with_adapters(
    arrivals: Sequence[Arrival], how: str, adapters: int, alpha: float, seed: int = 0
) -> list[Arrival]:
    """The same arrivals, each with an adapter.   how: of `ADAPTERS`"""
    times = np.array([arrival.time_s for arrival in arrivals])
    picks = ADAPTERS[how](times, adapters, alpha, np.random.default_rng(seed)).tolist()
    return [replace(arrival, adapter=pick) for arrival, pick in zip(arrivals, picks)]


def with_times(arrivals: Sequence[Arrival], how: str, rate: float, seed: int = 0) -> list[Arrival]:
    """The same lengths in the same order at other times.   how: of `TIMES`"""
    times = TIMES[how](len(arrivals), rate, np.random.default_rng(seed)).tolist()
    return [replace(arrival, time_s=time) for arrival, time in zip(arrivals, times)]


def with_sessions(
    arrivals: Sequence[Arrival], turns: float = 4, think_s: float = 20, longest: int = 16_384, seed: int = 0
) -> list[Arrival]:
    """Each arrival begins a session of about `turns` turns, all of its adapter; as many requests in all as before.

    Sessions begin so much later than the arrivals that there are about as many requests a second as before.

    A turn's prompt is all that was said so far, and as many tokens anew as the session began with. It comes about
    `think_s` seconds after the turn before. A session ends before a prompt and its answer pass `longest` tokens.

    ValueError for turns that are no number from 1 on.
    """
    if not 1 <= turns < float("inf"):
        raise ValueError(f"a session has at least one turn, and not infinitely many, got {turns}")
    rng = np.random.default_rng(seed)
    made: list[Arrival] = []
    for number, first in enumerate(arrivals):
        turn = replace(first, time_s=turns * first.time_s)
        for _ in range(int(rng.geometric(1 / turns))):
            made.append(replace(turn, session=number))
            said = turn.prompt_tokens + turn.output_tokens
            if said + first.prompt_tokens + first.output_tokens > longest:
                break
            later = turn.time_s + float(rng.exponential(think_s))
            turn = replace(turn, time_s=later, prompt_tokens=said + first.prompt_tokens)
        if len(made) >= len(arrivals):
            break
    return sorted(made[: len(arrivals)], key=lambda arrival: arrival.time_s)
