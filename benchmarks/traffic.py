"""Random traffic: when requests come, how long they are, and whose adapter they want."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Arrival:
    """One request to come.

    time_s    after the start
    adapter   number of its adapter, 0 the most popular; None = base
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: int | None


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


def zipf_shares(count: int, alpha: float) -> np.ndarray:
    """(count,) shares that sum to 1, the i-th in proportion to (i + 1) ** -alpha; alpha 0 = all alike."""
    weights = np.arange(1, count + 1, dtype=float) ** -alpha
    return weights / weights.sum()


def make_traffic(
    requests: int, rate: float, adapters: int, alpha: float, prompt: Lengths, output: Lengths, seed: int = 0
) -> list[Arrival]:
    """A Poisson process of `rate` requests a second; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    times = rng.exponential(1 / rate, requests).cumsum()
    prompts, outputs = prompt.draw(requests, rng), output.draw(requests, rng)
    picks = rng.choice(adapters, requests, p=zipf_shares(adapters, alpha)).tolist()
    return [Arrival(*each) for each in zip(times.tolist(), prompts, outputs, picks)]
