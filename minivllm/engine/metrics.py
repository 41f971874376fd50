"""What is measured of requests and steps. Stands for a part of vllm/v1/metrics/stats.py (v0.22.1)."""

from collections import Counter
from dataclasses import dataclass, field

from minivllm.core.request import Request


@dataclass
class RequestMetrics:
    """When things happened to one request; vLLM's RequestStateStats.

    Times are seconds of one monotonic clock, None until they happen.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    lora_wait_steps: int = 0

    def observe_admission(self, request: Request, now: float) -> None:
        """It joined the batch, for the first time or after a preemption."""
        if self.first_scheduled_time is None:
            self.first_scheduled_time = now
        self._count_waits(request)

    def observe(self, request: Request, now: float) -> None:
        """It got its first token, or ended."""
        if self.first_token_time is None and request.output_token_ids:
            self.first_token_time = now
        if request.is_finished:
            self.finished_time = now
        self._count_waits(request)

    def _count_waits(self, request: Request) -> None:
        self.num_preemptions = request.num_preemptions
        self.lora_wait_steps = request.lora_wait_steps

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class EngineMetrics:
    """What only the engine sees; vLLM's IterationStats, summed up.

    The scheduler counts tokens, preemptions and the prefix cache; the adapter manager counts hits, misses, loads and
    evictions. Nothing is counted twice.

    step_seconds: whole steps, from scheduling to output
    forward_seconds: of these, in the model's forward pass and its logits
    finished: requests by finish_reason
    """

    steps: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)

    def observe_step(self, step_seconds: float, forward_seconds: float) -> None:
        self.steps += 1
        self.step_seconds += step_seconds
        self.forward_seconds += forward_seconds

    def observe_finished(self, finish_reason: str) -> None:
        self.finished[finish_reason] += 1
