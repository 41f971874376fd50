"""What an engine says of itself: its counters, gathered in one place, and where everything is.

Stands for a part of vllm/v1/metrics/stats.py (v0.22.1).
"""

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum

import torch

from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.core import EngineCore
from minivllm.engine.metrics import EngineMetrics
from minivllm.layers.linear import LinearBase
from minivllm.lora.events import LoRAStats
from minivllm.observe.history import History


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
    states = {
        AdapterState.LOADING: adapter_id in adapters.worker.source.loading,
        AdapterState.IN_MEMORY: adapter_id in manager.list_adapters(),
        AdapterState.IN_A_SLOT: adapter_id in manager.list_active_adapters(),
        AdapterState.FAILED: adapter.failures,
        AdapterState.RELOADING: adapter.reloads,
        AdapterState.LEAVING: adapter.leaving,
    }
    return next((state for state in reversed(states) if states[state]), AdapterState.KNOWN)


def system_info() -> dict[str, object]:
    """The machine and the versions that an engine runs on."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu_count": len(gpus),
        "gpu_names": [gpu.name for gpu in gpus],
        "gpu_memory": [gpu.total_memory for gpu in gpus],
        "cuda_version": torch.version.cuda,
        "python_version": platform.python_version(),
        "pytorch_version": torch.__version__,
        "minivllm_version": importlib.metadata.version("minivllm"),
    }


def count_parameters(model: torch.nn.Module) -> int:
    """Of a base model, or the share that a process has, also where a linear's weight is packed (`LinearBase.pack`)."""
    packed = [m.packed_weight for m in model.modules() if isinstance(m, LinearBase)]
    return sum(weight.numel() for weight in (*model.parameters(), *packed) if weight is not None)


def model_info(engine: EngineCore) -> dict[str, object]:
    """The base model as it is served."""
    config = engine.config.model_config
    return {
        "model": config.model,
        "device": engine.config.device,
        "dtype": str(config.dtype),
        "max_model_len": config.max_model_len,
        "quantization": config.quantization,
        "parameters": count_parameters(engine.runner.model),
        "architecture": config.architecture.architecture,
        "num_hidden_layers": config.architecture.num_hidden_layers,
        "hidden_size": config.architecture.hidden_size,
        "vocab_size": config.architecture.vocab_size,
    }


def lora_info(engine: EngineCore) -> dict[str, object]:
    """How much LoRA an engine has room for."""
    manager = engine.adapters.manager
    config = {name: value for name, value in vars(manager.lora_config).items() if name != "lora_dtype"}
    return {
        **config,
        "lora_dtype": str(manager.lora_dtype),
        "backend": type(manager.punica_wrapper).__name__,
        "wrapped_modules": len(manager.modules),
    }


def what_it_is(engine: EngineCore) -> Iterator[str]:
    """Sentences about an engine that has just been made, for the log."""
    model, runner = model_info(engine), engine.runner
    yield (
        f"engine of '{model['model']}' ({model['architecture']}, {model['dtype']} on {model['device']}): "
        f"{runner.num_blocks} KV blocks of {engine.config.cache_config.block_size} tokens, batches of up to "
        f"{engine.config.scheduler_config.max_num_seqs} requests"
    )
    if engine.adapters is not None:
        lora = lora_info(engine)
        yield (
            f"LoRA: {lora['wrapped_modules']} modules are wrapped; {engine.adapters.manager.lora_slots} slots of rank "
            f"{lora['max_lora_rank']}, {engine.adapters.manager.capacity} adapters in memory, {lora['backend']}"
        )


def debug_info(engine: EngineCore, history: History) -> dict[str, object]:
    """Everything worth knowing when something looks wrong.

    Counters, queues, slots, memory and adapters; the model, LoRA's configuration and the machine; and what `History`
    has measured.
    """
    runner, scheduler, adapters = engine.runner, engine.scheduler, engine.adapters
    info: dict[str, object] = {
        "metrics": get_metrics(engine),
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "kv_blocks": runner.num_blocks,
        "kv_bytes": runner.num_blocks * runner.kv_block_bytes,
        "threads": str(runner.cpu_threads),
        "system": system_info(),
        "model": model_info(engine),
        **history.as_dict(),
    }
    if adapters is not None:
        manager = adapters.manager
        info |= {
            "lora": lora_info(engine),
            "slots": list(manager.lora_index_to_id),
            "free_slots": manager.get_free_slots(),
            "active_adapters": dict(manager.list_active_adapters()),
            "pinned": sorted(adapters.pinned),
            "states": {
                record.request.lora_name: state_of(adapters, i).value
                for i, record in adapters.adapters.items()
                if record.names  # else it is nobody's any more, and waits for its last request
            },
            "memory": manager.get_memory_stats(),
            "adapters": [manager.get_lora_info(adapter_id) for adapter_id in manager.list_adapters()],
        }
    return info
