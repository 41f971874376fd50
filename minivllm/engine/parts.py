"""What an engine is made of. Stands for `EngineCore.__init__` of vllm/v1/engine/core.py (v0.22.1)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueues
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.core import EngineCore
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.worker.model_runner import Executor, ModelRunner

# (configuration, tokenizer or None, whether to warm up, clock) -> what an engine is made of.
MakeCore = Callable[[EngineConfig, Any, bool, Callable[[], float]], EngineCore]


def plain_core(config: EngineConfig, tokenizer: Any, warm_up: bool, clock: Callable[[], float]) -> EngineCore:
    """The core's own parts: one runner in this process, no extension. `minivllm.assembly` has the others."""
    executor = Executor(ModelRunner(config, tokenizer=tokenizer))
    if warm_up:
        executor.warm_up()
    runner, queues = executor.runner, RequestQueues()
    adapters = AdapterRegistry(queues, runner.worker_manager) if runner.worker_manager else None
    options = scheduler_options(config, runner, queues, adapters)
    scheduler = Scheduler(*scheduler_arguments(config, runner), **options)
    return EngineCore(config, executor, scheduler, adapters, tokenizer, clock)


def scheduler_arguments(config: EngineConfig, runner: ModelRunner) -> tuple[Any, ...]:
    """The configurations that a `Scheduler` takes, with the KV blocks that the runner has."""
    cache_config = replace(config.cache_config, num_blocks=runner.num_blocks)
    return config.scheduler_config, cache_config, config.lora_config


def scheduler_options(
    config: EngineConfig, runner: ModelRunner, queues: RequestQueues, adapters: AdapterRegistry | None
) -> dict[str, Any]:
    """The options of a `Scheduler` that come from a configuration and a runner.

    queues     its requests
    adapters   their adapters' records, which say who has to wait and who is pinned; None without LoRA
    """
    options = {
        "queues": queues,
        "max_model_len": config.model_config.max_model_len,
        "most_tokens_beside_decodes": runner.graphs.most_tokens,
    }
    if (worker := runner.worker_manager) is not None:
        options["adapter_identity"] = lambda adapter_id: identity_of(worker, adapter_id)
        options["can_prefetch"] = runner.can_prefetch_lora
    if adapters is not None:
        options["why_wait"] = partial(_why_wait, adapters)
        options["pinned_adapters"] = adapters.pinned
    return options


def _why_wait(adapters: AdapterRegistry, request: Request) -> str | None:
    """`why_wait` of a `Scheduler`: a request waits while its adapter is to be reloaded, or is being read."""
    if request.lora_request is None:
        return None
    return adapters.why_wait(request) or adapters.worker.source.read_ahead(request.lora_request)


def identity_of(worker: LRUCacheWorkerLoRAManager, adapter_id: int) -> int | None:
    """A number that stands for the weights behind an id right now; None while they are not in memory."""
    lora = worker.manager.get_adapter(adapter_id)
    return lora and lora.load_id
