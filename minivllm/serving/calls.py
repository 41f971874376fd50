"""Functions that a client may have an engine in another process run between two steps, beside requests.

Stands for the methods that a UTILITY request may name (`EngineCoreRequestType` of vllm/v1/engine/__init__.py, v0.22.1)
and, for what monitors and pages read, for a part of vllm/v1/metrics/stats.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from minivllm.core.output import SchedulerOutput
from minivllm.engine.llm_engine import LLMEngine
from minivllm.lora.events import LoRAEvent
from minivllm.observe.recorder import room
from minivllm.observe.reports import SchedulerStats, scheduler_stats, state_of
from minivllm.observe.trace import StepRecord

# Of the engine and of arguments that can be pickled; so can the result.
Function = Callable[..., Any]
# Of the engine and a listener, which it registers; returns the function that unregisters it. Events can be pickled.
Subscribe = Callable[[LLMEngine, Callable[[Any], object]], Callable[[], object]]


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine's state between two steps, as its metrics show it.

    adapters           name of a count in LORA_GAUGES -> how many; empty for an engine without LoRA
    running, waiting   names of the adapters with requests in the batch, and of the others with requests in the queue
    """

    scheduler: SchedulerStats
    adapters: dict[str, int]
    running: list[str]
    waiting: list[str]
    max_loras: int

    @classmethod
    def of(cls, engine: LLMEngine) -> "EngineSnapshot":
        """The engine's state now."""
        stats, adapters = scheduler_stats(engine.scheduler), engine.adapters
        if adapters is None:
            return cls(stats, {}, [], [], 0)
        running = {request.adapter_id for request in engine.scheduler.running}
        waiting = set(engine.scheduler.waiting.adapters) - running
        counts = {
            "known": len(adapters.adapters),
            "in_memory": len(adapters.manager.list_adapters()),
            "in_slots": len(adapters.manager.list_active_adapters()),
        }
        names = [sorted({adapters.name_of(i) for i in ids if i}) for ids in (running, waiting)]
        return cls(stats, counts, *names, adapters.manager.lora_slots)


def describe_adapters(engine: LLMEngine) -> dict[int, dict[str, Any]]:
    """State, slot, pin, bytes, last use and version of every adapter that the engine knows, by id."""
    if engine.adapters is None:
        return {}
    registry, manager = engine.adapters, engine.adapters.manager
    slots, held = manager.list_active_adapters(), manager.list_adapters()
    histories = manager.stats.by_adapter
    known = {
        adapter_id: {
            "state": state_of(registry, adapter_id).value,
            "slot": slots.get(adapter_id),
            "pinned": adapter_id in registry.pinned,
            "bytes": held[adapter_id].nbytes if adapter_id in held else None,
            "last_used": histories[adapter_id].last_used if adapter_id in histories else None,
            "version": registry.adapters[adapter_id].request.version,
        }
        for adapter_id in registry.adapters
    }
    return known | {given: known[newest] for given, newest in registry.aliases.items()}


def is_leaving(engine: LLMEngine, adapter_id: int) -> bool:
    """Whether an adapter is being unloaded, and waits for the last requests that use it."""
    if engine.adapters is None:
        return False
    adapter = engine.adapters.adapters.get(engine.adapters.aliases.get(adapter_id, adapter_id))
    return adapter is not None and adapter.leaving


def newest_steps(engine: LLMEngine, most: int) -> tuple[list[StepRecord], dict[str, int]]:
    """The records of the last steps, and the engine's capacities (`room`)."""
    return engine.trace.records[-most:], room(engine)


def step_records(engine: LLMEngine, listener: Callable[[StepRecord], object]) -> Callable[[], object]:
    """Call a listener with the record of every step; returns what ends that."""

    def on_step(scheduled: SchedulerOutput) -> None:
        listener(engine.trace.records[-1])  # the engine's recorder was called before

    engine.listeners.append(on_step)
    return partial(engine.listeners.remove, on_step)


def adapter_events(engine: LLMEngine, listener: Callable[[LoRAEvent], object]) -> Callable[[], object]:
    """Call a listener with every event of adapters (load, activate, evict, ...); returns what ends that."""
    if engine.adapters is None:
        return lambda: None
    listeners = engine.adapters.manager.listeners
    listeners.append(listener)
    return partial(listeners.remove, listener)


def update_lora(engine: LLMEngine, adapter: str | int, weights: Any, options: dict[str, Any]) -> int:
    """As `LLMEngine.update_lora`, with its options in a dict."""
    return engine.update_lora(adapter, weights, **options)


CALLS: tuple[Function, ...] = (
    *(LLMEngine.add_lora, update_lora, LLMEngine.remove_lora, LLMEngine.pin_lora, LLMEngine.unpin_lora),
    *(LLMEngine.list_loras, LLMEngine.get_tokenizer),
    *(EngineSnapshot.of, describe_adapters, is_leaving, newest_steps, step_records, adapter_events),
)


def name_of(function: Function) -> str:
    """The name by which a message names a function."""
    return f"{function.__module__}.{function.__qualname__}"
