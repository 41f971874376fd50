"""The one place where an engine is put together: from a configuration to parts, which constructors are given.

Stands for `EngineCore.__init__` of vllm/v1/engine/core.py (v0.22.1) and for the choices that vLLM makes by flags all
over its code. The core never imports this file, nor any extension; only this file knows every extension.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from minivllm.ahead import AHEAD
from minivllm.alora import ALORA
from minivllm.config import EngineConfig
from minivllm.core.request_queue import RequestQueues
from minivllm.core.scheduler import Scheduler
from minivllm.dora import DORA
from minivllm.engine import llm, llm_engine
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.core import EngineCore
from minivllm.engine.input_processor import base_limits
from minivllm.engine.parts import scheduler_arguments, scheduler_options
from minivllm.engine_args import EngineArgs
from minivllm.extension import Extension
from minivllm.gpu import GPU
from minivllm.layers.ranks import ONE_RANK, Ranks
from minivllm.lora.extensions import LoRAExtensions
from minivllm.lora.request import LoRARequest
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.mixes import MIXES
from minivllm.observe import OBSERVE
from minivllm.options import OPTIONS
from minivllm.parallel import PARALLEL
from minivllm.parts import Parts, is_not_there
from minivllm.policies import POLICIES
from minivllm.sizing import SIZING
from minivllm.sources import SOURCES
from minivllm.versions import VERSIONS
from minivllm.worker.model_runner import ModelRunner

# Each can be taken away: its folder, its import above and its line here.
EXTENSIONS: tuple[Extension, ...] = (
    OPTIONS,
    ALORA,
    DORA,
    MIXES,
    SOURCES,
    POLICIES,
    GPU,
    PARALLEL,
    AHEAD,
    OBSERVE,
    SIZING,
    VERSIONS,
)


def lora_extensions(extensions: Iterable[Extension]) -> LoRAExtensions:
    """What all of them bring for adapters: `options` one after the other, and each other field from one of them.

    ValueError where two bring the same field: one would be lost in silence.
    """
    fields: dict[str, Any] = {"options": ()}
    for extension in extensions:
        brought = dict(extension.lora)
        fields["options"] += tuple(brought.pop("options", ()))
        if twice := fields.keys() & brought.keys():
            raise ValueError(
                f"two extensions bring {', '.join(sorted(twice))} of LoRAExtensions; let one bring both"
            )
        fields |= brought
    return LoRAExtensions(**fields)


# What adapters may have, where they come from, and what computes them.
LORA_EXTENSIONS = lora_extensions(EXTENSIONS)


def model_folder(model: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder of a base model, which an extension may find by another name; what nobody finds is given back."""
    if not isinstance(model, str | os.PathLike) or os.path.isdir(os.path.expanduser(model)):
        return model  # what is no path the configuration refuses
    name = os.fspath(model)
    return next((folder for each in EXTENSIONS if (folder := each.find_model(name))), name)


def mix(parts: Iterable[tuple[LoRARequest | str, float]]) -> LoRARequest:
    """One adapter of several, each with a weight, by the extension that has such."""
    if (make := next((each.mix for each in EXTENSIONS if each.mix), None)) is None:
        raise is_not_there("mixes", "lora_mix", dict(parts))
    return make(parts)


def parts_of(config: EngineConfig) -> Parts:
    """What an engine of this configuration is made of: a function of the configuration alone, so that the processes of
    other ranks come to the same parts.
    """
    parts = Parts(config, LORA_EXTENSIONS)
    for extension in EXTENSIONS:
        extension.add_to(parts)
    return parts


def make_core(parts: Parts, tokenizer: Any, warm_up: bool, clock: Callable[[], float]) -> EngineCore:
    """The core of these parts. FileNotFoundError and ValueError say what cannot be served."""
    config = parts.config
    executor = parts.make_executor(config, make_model_runner, tokenizer)
    if warm_up:
        executor.warm_up()
    queues, adapters, limits_of = RequestQueues(), None, base_limits
    if (worker := executor.runner.worker_manager) is not None:
        limits_of = parts.make_limits_of(worker.manager, tokenizer is not None)
        adapters = parts.make_registry(queues, worker, parts.find_by_name, parts.look_up_parts, clock)
        listeners = (make(adapters.manager.get_adapter) for make in parts.make_listeners)
        adapters.manager.listeners.extend(listeners)
    scheduler = make_scheduler(parts, executor.runner, queues, adapters)
    core_class = parts.core_class(executor.runner)
    return core_class(config, executor, scheduler, adapters, tokenizer, clock, limits_of)


def make_model_runner(
    config: EngineConfig,
    tp: Ranks = ONE_RANK,
    adapters_are_active: Callable[[], None] | None = None,
    tokenizer: Any = None,
) -> ModelRunner:
    """The runner that a configuration asks for, in whatever process. Parameters as of `ModelRunner`."""
    parts = parts_of(config)
    make_manager = partial(
        LRUCacheWorkerLoRAManager,
        make_manager=partial(parts.manager_class, **parts.manager),
        make_source=parts.make_source,
        extensions=parts.lora,
    )
    return ModelRunner(
        config,
        tp=tp,
        tokenizer=tokenizer,
        adapters_are_active=adapters_are_active,
        make_lora_manager=make_manager,
        **parts.runner,
    )


def make_scheduler(
    parts: Parts, runner: ModelRunner, queues: RequestQueues, adapters: AdapterRegistry | None
) -> Scheduler:
    """The scheduler that goes with a runner's memory.   queues, adapters: as of `scheduler_options`"""
    config, worker = parts.config, runner.worker_manager
    options = scheduler_options(config, runner, queues, adapters)
    get_adapter = worker.manager.get_adapter if worker else lambda adapter_id: None
    policy = parts.make_policy(config.scheduler_config, get_adapter)
    return parts.make_scheduler(runner, *scheduler_arguments(config, runner), policy=policy, **options)


class LLMEngine(llm_engine.LLMEngine):
    """The core's engine, made of whatever its configuration asks for; it tells what it did. vLLM: `LLMEngine`.

    trace   what every step did; without the `listeners` nothing is recorded
    """

    def __init__(self, config: EngineConfig, *args: Any, **options: Any) -> None:
        self._parts = parts_of(config)
        super().__init__(config, *args, **options)
        self._observer = self._parts.make_observer(self.core)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        """As the core's; `args.model` may be a Hugging Face id."""
        return super().from_engine_args(replace(args, model=model_folder(args.model)))

    def make_core(
        self, config: EngineConfig, tokenizer: Any, warm_up: bool, clock: Callable[[], float]
    ) -> EngineCore:
        return make_core(self._parts, tokenizer, warm_up, clock)

    @property
    def trace(self) -> Any:
        return self._observer.trace

    def get_metrics(self) -> dict[str, object]:
        """All counters as plain values."""
        return self._observer.get_metrics()

    def debug_info(self) -> dict[str, object]:
        """Everything worth knowing when something looks wrong: counters, slots, memory, adapters, queues."""
        return self._observer.debug_info()


class LLM(llm.LLM):
    """The core's `LLM` around such an engine. vLLM: `LLM`."""

    engine_class = LLMEngine
