"""What an engine is made of: the core's own parts, until the extensions of `minivllm.assembly` put others there.

vLLM (v0.22.1) has flags all over its code for this.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minivllm.config import EngineConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler, SchedulingPolicy, first_come_first_served
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.core import EngineCore
from minivllm.engine.input_processor import LimitsOf, base_limits
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.loading import AdapterSource
from minivllm.lora.lora_model import LoRAModel
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.request import LoRARequest
from minivllm.worker.model_runner import Executor, ModelRunner

# Adapter id -> its weights if they are in memory.
GetAdapter = Callable[[int], LoRAModel | None]


def run_here(config: EngineConfig, make_runner: Callable[..., ModelRunner], tokenizer: Any) -> Executor:
    """One runner in this process.   make_runner: `minivllm.assembly.make_model_runner`"""
    if (size := config.parallel_config.tensor_parallel_size) > 1:
        raise is_not_there("parallel", "tensor_parallel_size", size)
    return Executor(make_runner(config, tokenizer=tokenizer))


def as_they_came(config: SchedulerConfig, get_adapter: GetAdapter) -> SchedulingPolicy:
    """The order of a plain scheduler."""
    if config.policy != "fcfs":
        raise is_not_there("policies", "scheduling_policy", config.policy)
    return first_come_first_served


class Observer:
    """What an engine tells of itself: this one nothing, and says so. `minivllm.observe` has one that watches."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    @property
    def trace(self) -> Any:
        """The records of steps."""
        raise RuntimeError("the trace of an engine needs minivllm.observe, which is not there")

    def get_metrics(self) -> dict[str, object]:
        raise RuntimeError("the metrics of an engine need minivllm.observe, which is not there")

    def debug_info(self) -> dict[str, object]:
        raise RuntimeError("what an engine says of itself needs minivllm.observe, which is not there")


@dataclass
class Parts:
    """What an engine of one configuration is made of: the core's own parts, until extensions put others there.

    lora             what adapters have, come from and are computed by
    runner           further arguments of `ModelRunner`
    manager_class, manager   what keeps adapters in memory and slots, and further arguments of it
    make_limits_of   (manager, with_tokenizers) -> `limits_of` of `EngineCore`
    make_source      as of `LRUCacheWorkerLoRAManager`
    make_registry    (queues, worker, find_by_name, look_up_parts, clock) -> the records of adapters
    find_by_name, look_up_parts   as of `AdapterRegistry`
    make_listeners   each makes one that hears of what happens to adapters, of what looks an adapter up
    make_executor    as `run_here`
    make_policy      as `as_they_came`
    make_scheduler   (runner, arguments and options of `Scheduler`) -> the scheduler
    core_class       gives the class of the core for a runner that is warm
    make_observer    makes what the engine tells of itself
    """

    config: EngineConfig
    lora: LoRAExtensions
    runner: dict[str, Any] = field(default_factory=dict)
    manager_class: type[LRUCacheLoRAModelManager] = LRUCacheLoRAModelManager
    manager: dict[str, Any] = field(default_factory=dict)
    make_limits_of: Callable[..., LimitsOf] = lambda manager, with_tokenizers: base_limits
    make_source: Callable[..., AdapterSource] = AdapterSource
    make_registry: Callable[..., AdapterRegistry] = (
        lambda queues, worker, find_by_name, look_up_parts, clock: AdapterRegistry(
            queues, worker, find_by_name, look_up_parts
        )
    )
    find_by_name: Callable[..., Any] | None = None
    look_up_parts: Callable[..., LoRARequest] | None = None
    make_listeners: list[Callable[[GetAdapter], Any]] = field(default_factory=list)
    make_executor: Callable[..., Executor] = run_here
    make_policy: Callable[[SchedulerConfig, GetAdapter], SchedulingPolicy] = as_they_came
    make_scheduler: Callable[..., Scheduler] = lambda runner, *arguments, **options: Scheduler(
        *arguments, **options
    )
    core_class: Callable[[ModelRunner], type[EngineCore]] = lambda runner: EngineCore
    make_observer: Callable[[EngineCore], Observer] = Observer


def is_not_there(extension: str, option: str, value: object) -> ValueError:
    """What an option is answered with whose extension was taken away."""
    return ValueError(f"{option} {value!r} needs minivllm.{extension}, which is not there")
