"""The one place where an engine is put together: from a configuration to parts, which constructors are given.

Stands for `EngineCore.__init__` of vllm/v1/engine/core.py (v0.22.1) and for the choices that vLLM makes by flags all
over its code. The core never imports this file, nor any extension; only this file knows every extension.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minivllm.config import KERNEL_BACKENDS, PAGED_BACKENDS, EngineConfig, LoRAConfig
from minivllm.core.request_queue import RequestQueues
from minivllm.core.scheduler import Scheduler, first_come_first_served
from minivllm.economics import refuse_slots_that_do_not_fit
from minivllm.engine import llm, llm_engine
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.core import EngineCore
from minivllm.engine.parts import scheduler_arguments, scheduler_options
from minivllm.gpu import BACKENDS, make_slot_writer
from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.observe import reports
from minivllm.observe.event_log import EventLog
from minivllm.observe.recorder import Recorder, WatchedLine
from minivllm.options import OPTIONS, SHARDED_WRAPPERS, TraitsReader
from minivllm.policies.install import cache_as_configured, scheduling_policy
from minivllm.sources import FILE_FORMATS, FOLDER_SOURCES, find_by_name, read_tensors
from minivllm.worker.executor import Executor
from minivllm.worker.kv_memory import KVMemory
from minivllm.worker.model_runner import BuildAttention, ModelRunner

# What adapters may have, where they come from, and what computes them.
LORA_EXTENSIONS = LoRAExtensions(
    options=OPTIONS,
    sharded_wrappers=SHARDED_WRAPPERS,
    file_formats=FILE_FORMATS,
    folder_sources=FOLDER_SOURCES,
    read_request=read_tensors,
    backends=BACKENDS,
)


def make_core(config: EngineConfig, tokenizer: Any, warm_up: bool, clock: Callable[[], float]) -> EngineCore:
    """The core that a configuration asks for. FileNotFoundError and ValueError say what cannot be served."""
    executor = make_executor(config, tokenizer)
    if warm_up:
        executor.warm_up()
    queues, adapters = RequestQueues(), None
    if (worker := executor.runner.worker_manager) is not None:
        reader = TraitsReader(worker.manager, with_tokenizers=tokenizer is not None)
        adapters = AdapterRegistry(queues, worker, traits_reader=reader, find_by_name=find_by_name)
        adapters.manager.listeners.append(EventLog(adapters.manager.get_adapter))
    scheduler = make_scheduler(config, executor.runner, queues, adapters)
    core_class = EngineCore
    if config.scheduler_config.async_scheduling and executor.runner.graphs.hold_most_steps:
        from minivllm.ahead.lookahead import LookaheadCore as core_class
    return core_class(config, executor, scheduler, adapters, tokenizer, clock)


class LLMEngine(llm_engine.LLMEngine):
    """The core's engine, made of whatever its configuration asks for; it tells what it did. vLLM: `LLMEngine`.

    trace   what every step did; without the `listeners` nothing is recorded
    """

    make_core = staticmethod(make_core)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        recorder = Recorder(self.core)
        self.trace = recorder.trace
        self.listeners.append(recorder)

    def get_metrics(self) -> dict[str, object]:
        """All counters as plain values."""
        return reports.get_metrics(self.core)

    def debug_info(self) -> dict[str, object]:
        """Everything worth knowing when something looks wrong: counters, slots, memory, adapters, queues."""
        return reports.debug_info(self.core)


class LLM(llm.LLM):
    """The core's `LLM` around such an engine. vLLM: `LLM`."""

    engine_class = LLMEngine


def make_executor(config: EngineConfig, tokenizer: Any = None) -> Executor:
    """One runner in this process, or one that has other ranks run each step too.   tokenizer: as of `ModelRunner`"""
    if config.parallel_config.tensor_parallel_size == 1:
        return Executor(make_model_runner(config, tokenizer=tokenizer))
    from minivllm.parallel.leader import start_ranks

    return start_ranks(config, make_model_runner, tokenizer=tokenizer)


def make_model_runner(
    config: EngineConfig,
    tp: Ranks = ONE_RANK,
    adapters_are_active: Callable[[], None] | None = None,
    tokenizer: Any = None,
) -> ModelRunner:
    """The runner that a configuration asks for. Parameters as of `ModelRunner`."""
    options = {} if torch.device(config.device).type == "cpu" else _gpu_parts(config)
    if adapters_are_active is not None:
        options["adapters_are_active"] = adapters_are_active
    if config.lora_config is not None:
        make_manager = make_model_manager(config.lora_config, config.device)
        options["make_lora_manager"] = partial(
            LRUCacheWorkerLoRAManager, make_manager=make_manager, extensions=LORA_EXTENSIONS
        )
        if config.lora_config.backend_on(config.device) in PAGED_BACKENDS:
            from minivllm.gpu.shared_memory import SharedMemory

            options["memory"] = SharedMemory(options.get("memory", KVMemory()))
    if config.model_config.batch_invariant:
        from minivllm.gpu.invariant_attention import build_invariant_attention
        from minivllm.gpu.kernels.invariant_linear import invariant_linear

        options["build_attention"] = build_invariant_attention(config)
        options["linear_product"] = invariant_linear
    if runs_kernels(config):
        from minivllm.gpu.fused import fuse

        options["prepare_model"] = fuse
    return ModelRunner(
        config,
        tp=tp,
        tokenizer=tokenizer,
        check_slots=partial(refuse_slots_that_do_not_fit, extensions=LORA_EXTENSIONS),
        **options,
    )


def runs_kernels(config: EngineConfig) -> bool:
    """Whether steps run on Triton's kernels: on a GPU, or where options ask for them, through Triton's interpreter."""
    if torch.device(config.device).type != "cpu" or config.model_config.batch_invariant:
        return True
    return config.lora_config is not None and config.lora_config.backend_on(config.device) in KERNEL_BACKENDS


def make_model_manager(config: LoRAConfig, device: str) -> Callable[..., LRUCacheLoRAModelManager]:
    """What makes the manager of a model's adapters, with the arguments of `LRUCacheLoRAModelManager`."""
    manager_class = LRUCacheLoRAModelManager
    if config.backend_on(device) in PAGED_BACKENDS:
        from minivllm.gpu.elastic_manager import ElasticModelManager as manager_class
    options = {"make_cache": cache_as_configured(config)}
    if torch.device(device).type != "cpu":
        options["make_slot_writer"] = make_slot_writer
    return partial(manager_class, **options)


def _gpu_parts(config: EngineConfig) -> dict[str, object]:
    """What a runner on a GPU has in the place of the plain parts: `memory`, and for 16 bits paged attention, `capture`.

    Steps in float32, which nobody serves, have PyTorch's attention and run eagerly.
    """
    from minivllm.gpu.measured_memory import MeasuredMemory

    is_paged = config.model_config.dtype in (torch.float16, torch.bfloat16)
    captures = is_paged and not config.model_config.enforce_eager
    parts: dict[str, object] = {"memory": MeasuredMemory(captures)}
    if is_paged:
        parts["build_attention"] = paged_attention(config)
    if captures:
        from minivllm.gpu.step_graphs import StepGraphs

        buffers = {}
        if config.model_config.batch_invariant:
            from minivllm.gpu.invariant_attention import InvariantBuffers

            buffers["decode_buffers"] = InvariantBuffers
        parts["capture"] = partial(StepGraphs.of_all_steps, **buffers)
    return parts


def make_scheduler(
    config: EngineConfig, runner: ModelRunner, queues: RequestQueues, adapters: AdapterRegistry | None
) -> Scheduler:
    """The scheduler that goes with a runner's memory.   queues, adapters: as of `scheduler_options`"""
    arguments = scheduler_arguments(config, runner)
    options = scheduler_options(config, runner, queues, adapters)
    get_adapter = runner.worker_manager.manager.get_adapter if runner.worker_manager else lambda _: None
    policy = scheduling_policy(config.scheduler_config, get_adapter)
    options["policy"] = WatchedLine() if policy is first_come_first_served else policy
    if blocks_a_page := getattr(runner.memory_plan, "blocks_a_page", 0):
        from minivllm.gpu.elastic.scheduler import ElasticScheduler

        manager = runner.worker_manager.manager
        return ElasticScheduler(*arguments, manager=manager, blocks_a_page=blocks_a_page, **options)
    return Scheduler(*arguments, **options)


def paged_attention(config: EngineConfig) -> BuildAttention:
    """Attention that reads the KV cache where it lies, by kernels for GPUs."""
    from minivllm.gpu.paged_attention import PagedAttentionMetadata

    return partial(
        PagedAttentionMetadata.build,
        block_size=config.cache_config.block_size,
        device=config.device,
        max_seq_len=config.model_config.max_model_len,
    )
