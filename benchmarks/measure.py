"""Running an engine step by step, and what its steps say."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minivllm.assembly import LLMEngine


@dataclass(frozen=True)
class Step:
    """One call of `LLMEngine.step`.

    started, ended   seconds of `time.perf_counter`
    emitted          ids of the requests that got a token in it, one each
    """

    started: float
    ended: float
    emitted: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def run_step(engine: LLMEngine) -> Step:
    """One step, timed. RuntimeError when a request failed in it: a benchmark of errors measures nothing."""
    started = time.perf_counter()
    outputs = engine.step()
    ended = time.perf_counter()
    if failed := [output for output in outputs if output.error]:
        raise RuntimeError(f"request '{failed[0].request_id}' failed: {failed[0].error}")
    return Step(
        started, ended, tuple(output.request_id for output in outputs if output.outputs[0].delta_token_ids)
    )


def run_to_end(engine: LLMEngine) -> list[Step]:
    """Step until no request is left."""
    steps = []
    while engine.has_unfinished_requests():
        steps.append(run_step(engine))
    return steps


def full_decode_steps(steps: Iterable[Step], requests: int) -> list[Step]:
    """The steps in which every one of `requests` requests got a token that was not its first."""
    seen: set[str] = set()
    full = []
    for step in steps:
        if len(step.emitted) == requests and seen.issuperset(step.emitted):
            full.append(step)
        seen.update(step.emitted)
    return full


def prompt_steps(steps: Iterable[Step], requests: int) -> list[Step]:
    """The steps before all `requests` had their first token in which no request got a later one."""
    seen: set[str] = set()
    found = []
    for step in steps:
        if len(seen) < requests and seen.isdisjoint(step.emitted):
            found.append(step)
        seen.update(step.emitted)
    return found


def token_times(steps: Iterable[Step]) -> dict[str, list[float]]:
    """Request id -> when each of its tokens came."""
    times: dict[str, list[float]] = {}
    for step in steps:
        for request_id in step.emitted:
            times.setdefault(request_id, []).append(step.ended)
    return times


def decode_summary(steps: Sequence[Step], requests: int) -> dict[str, float]:
    """What one pass of `requests` requests, all queued before its first step, comes to. Times in ms.

    tokens_per_second     over the steps in which all requests decode
    step_ms               median of these steps
    prefill_ms            from the first step's start until the last request has its first token
    prompt_steps_ms       of the steps that hold prompts alone
    ttft_p50_ms .. p99    first tokens, from the first step's start
    itl_p50_ms .. p99     gaps between successive tokens of a request
    """
    decode = full_decode_steps(steps, requests)
    if not decode:
        raise ValueError("no step in which all requests decode; ask for more output tokens")
    seconds = [step.seconds for step in decode]
    times = token_times(steps)
    firsts = [request_times[0] - steps[0].started for request_times in times.values()]
    return {
        "tokens_per_second": requests * len(decode) / sum(seconds),
        "step_ms": 1e3 * float(np.median(seconds)),
        "prefill_ms": 1e3 * max(firsts),
        "prompt_steps_ms": 1e3 * sum(step.seconds for step in prompt_steps(steps, requests)),
        **percentiles("ttft", firsts),
        **percentiles("itl", gaps(times)),
    }


def gaps(times: dict[str, list[float]]) -> list[float]:
    """Seconds between successive tokens, of all requests together."""
    return [gap for request_times in times.values() for gap in np.diff(request_times).tolist()]


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, as `{name}_p50_ms` and `{name}_p99_ms`; NaN of nothing."""
    ranks = np.percentile(seconds, (50, 99)) if len(seconds) else (float("nan"),) * 2
    return {f"{name}_p{rank}_ms": 1e3 * float(value) for rank, value in zip((50, 99), ranks)}


def median_of(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every entry over several passes."""
    return {name: float(np.median([one[name] for one in passes])) for name in passes[0]}


class HostShare:
    """How much of the engine's step time was spent outside the model runner: scheduling and outputs.

    The runner's part holds host work, too; on a GPU this is a lower bound of what the host costs.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.metrics = engine.metrics
        self.before = (self.metrics.step_seconds, self.metrics.forward_seconds)

    def read(self) -> float:
        """Since this was made; 0 when there was no step."""
        step = self.metrics.step_seconds - self.before[0]
        return 1 - (self.metrics.forward_seconds - self.before[1]) / step if step else 0.0
