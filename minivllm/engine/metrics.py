"""The engine's counters, gathered in one place. Stands for vllm/v1/metrics/stats.py (v0.22.1)."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from minivllm.core.scheduler import SchedulerStats
from minivllm.lora.stats import LoRAStats


@dataclass
class EngineMetrics:
    """What only the engine sees; vLLM's IterationStats, summed up.

    The scheduler counts tokens, preemptions and the prefix cache; the adapter manager counts hits, misses,
    loads and evictions. `snapshot` puts the three together; nothing is counted twice.

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

    def snapshot(self, scheduler: SchedulerStats, lora: LoRAStats | None = None) -> dict[str, object]:
        """All counters as plain values that JSON takes. lora: None for an engine without adapters"""
        return {
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "forward_seconds": self.forward_seconds,
            "tokens_per_second": scheduler.num_sampled_tokens / self.step_seconds if self.steps else 0.0,
            "finished": dict(self.finished),
            "scheduler": asdict(scheduler),
            "lora": lora.as_dict() if lora is not None else None,
        }
