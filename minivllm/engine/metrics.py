"""The engine's counters, gathered in one place. Stands for vllm/v1/metrics/stats.py (v0.22.1)."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum

from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.lora.stats import LoRAStats
from minivllm.worker.model_runner import ModelRunner


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


@dataclass(frozen=True)
class SchedulerStats:
    """Counters since the start, and the state of the queues and the cache. vLLM: `SchedulerStats`."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_free_blocks: int
    num_cached_blocks: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_computed_tokens: int
    num_sampled_tokens: int


def scheduler_stats(scheduler: Scheduler) -> SchedulerStats:
    """vLLM: `Scheduler.make_stats`."""
    cache = scheduler.kv_cache
    return SchedulerStats(
        num_running_reqs=len(scheduler.running),
        num_waiting_reqs=len(scheduler.waiting),
        num_free_blocks=cache.block_pool.get_num_free_blocks(),
        num_cached_blocks=len(cache.block_pool.hash_of),
        kv_cache_usage=1 - len(cache.block_pool.free) / cache.block_pool.num_usable_blocks,
        prefix_cache_queries=cache.prefix_cache_stats.queries,
        prefix_cache_hits=cache.prefix_cache_stats.hits,
        num_preemptions=scheduler.num_preemptions,
        num_computed_tokens=scheduler.num_computed_tokens,
        num_sampled_tokens=scheduler.num_sampled_tokens,
    )


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


class AdapterState(Enum):
    """Where an adapter is, by its record and the manager's tables; for people. The later of two that are true counts.

    KNOWN       requests may name it; a step that needs it reads it
    LOADING     it is read beside the steps
    FAILED      a reload has failed, and the requests that waited for it do not know yet
    RELOADING   a reload waits for requests
    LEAVING     an unload waits for requests; new ones are refused
    """

    KNOWN = "known"
    LOADING = "loading"
    IN_MEMORY = "in memory"
    IN_A_SLOT = "in a slot"
    FAILED = "failed"
    RELOADING = "reloading"
    LEAVING = "leaving"


def state_of(adapters: AdapterRegistry, adapter_id: int) -> AdapterState:
    """KeyError for an id that no adapter has."""
    adapter, manager = adapters.adapters[adapter_id], adapters.manager
    told = {
        AdapterState.LOADING: adapter_id in adapters.loading,
        AdapterState.IN_MEMORY: adapter_id in manager.list_adapters(),
        AdapterState.IN_A_SLOT: adapter_id in manager.list_active_adapters(),
        AdapterState.FAILED: adapter.failures,
        AdapterState.RELOADING: adapter.reloads,
        AdapterState.LEAVING: adapter.leaving,
    }
    return next((state for state in reversed(told) if told[state]), AdapterState.KNOWN)


class EngineReports:
    """What an engine tells of itself. Its parts are those of `EngineCore`."""

    runner: ModelRunner
    scheduler: Scheduler
    adapters: AdapterRegistry | None
    metrics: EngineMetrics

    def get_metrics(self) -> dict[str, object]:
        """All counters as plain values."""
        lora = self.adapters.manager.stats if self.adapters else None
        return self.metrics.snapshot(scheduler_stats(self.scheduler), lora)

    def debug_info(self) -> dict[str, object]:
        """Everything worth knowing when something looks wrong: counters, slots, memory, adapters, queues."""
        return {"metrics": self.get_metrics()} | debug_info(self.runner, self.scheduler, self.adapters)


def debug_info(
    runner: ModelRunner, scheduler: Scheduler, adapters: AdapterRegistry | None
) -> dict[str, object]:
    """`EngineReports.debug_info`, but for the counters."""
    info: dict[str, object] = {
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "kv_blocks": runner.num_blocks,
        "kv_bytes": runner.num_blocks * runner.kv_block_bytes,
        "threads": str(runner.cpu_threads),
    }
    if adapters is not None:
        manager = adapters.manager
        info |= {
            "slots": list(manager.lora_index_to_id),
            "free_slots": manager.get_free_slots(),
            "active_adapters": dict(manager.list_active_adapters()),
            "pinned": sorted(adapters.pinned),
            "states": {adapters.name_of(i): state_of(adapters, i).value for i in adapters.adapters},
            "memory": manager.get_memory_stats(),
            "adapters": [manager.get_lora_info(adapter_id) for adapter_id in manager.list_adapters()],
        }
    return info
