"""What an engine says of itself: its counters, gathered in one place, and where everything is.

Stands for a part of vllm/v1/metrics/stats.py (v0.22.1).
"""

from dataclasses import asdict, dataclass
from enum import Enum

from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.core import EngineCore
from minivllm.engine.metrics import EngineMetrics
from minivllm.lora.events import LoRAStats


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


def get_metrics(engine: EngineCore) -> dict[str, object]:
    """All counters as plain values."""
    lora = engine.adapters.manager.stats if engine.adapters is not None else None
    return snapshot(engine.metrics, scheduler_stats(engine.scheduler), lora)


def snapshot(
    metrics: EngineMetrics, scheduler: SchedulerStats, lora: LoRAStats | None = None
) -> dict[str, object]:
    """Counters of three owners as plain values that JSON takes.   lora: None for an engine without adapters"""
    return {
        "steps": metrics.steps,
        "step_seconds": metrics.step_seconds,
        "forward_seconds": metrics.forward_seconds,
        "tokens_per_second": scheduler.num_sampled_tokens / metrics.step_seconds if metrics.steps else 0.0,
        "finished": dict(metrics.finished),
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
        AdapterState.LOADING: adapter_id in adapters.worker.source.loading,
        AdapterState.IN_MEMORY: adapter_id in manager.list_adapters(),
        AdapterState.IN_A_SLOT: adapter_id in manager.list_active_adapters(),
        AdapterState.FAILED: adapter.failures,
        AdapterState.RELOADING: adapter.reloads,
        AdapterState.LEAVING: adapter.leaving,
    }
    return next((state for state in reversed(told) if told[state]), AdapterState.KNOWN)


def debug_info(engine: EngineCore) -> dict[str, object]:
    """Everything worth knowing when something looks wrong: counters, slots, memory, adapters, queues."""
    runner, scheduler, adapters = engine.runner, engine.scheduler, engine.adapters
    info: dict[str, object] = {
        "metrics": get_metrics(engine),
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
