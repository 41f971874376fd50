"""What an engine says of itself between two steps, for pages and monitors. Stands for a part of
vllm/v1/metrics/stats.py (v0.22.1).

Functions to be called where the engine is (`AsyncLLM.call`); what they return can be sent to another process.
"""

from dataclasses import dataclass
from typing import Any

from minivllm.engine.llm_engine import LLMEngine
from minivllm.observe.recorder import room
from minivllm.observe.reports import SchedulerStats, scheduler_stats, state_of
from minivllm.observe.trace import StepRecord


@dataclass(frozen=True)
class EngineView:
    """What an engine says of itself between two steps.

    adapters           name of a count in LORA_GAUGES -> how many; empty for an engine without LoRA
    running, waiting   names of the adapters with requests in the batch, and of the others with requests in the queue
    """

    scheduler: SchedulerStats
    adapters: dict[str, int]
    running: list[str]
    waiting: list[str]
    max_loras: int

    @classmethod
    def of(cls, engine: LLMEngine) -> "EngineView":
        """To be called where the engine is."""
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
        names = [sorted(adapters.name_of(i) for i in ids if i) for ids in (running, waiting)]
        return cls(stats, counts, *names, adapters.manager.lora_slots)


def describe(engine: LLMEngine) -> dict[int, dict[str, Any]]:
    """Of every adapter that the engine knows, by id. To be called where the engine is."""
    if engine.adapters is None:
        return {}
    registry, manager = engine.adapters, engine.adapters.manager
    slots, held = manager.list_active_adapters(), manager.list_adapters()
    histories = manager.stats.by_adapter
    return {
        adapter_id: {
            "state": state_of(registry, adapter_id).value,
            "slot": slots.get(adapter_id),
            "pinned": adapter_id in registry.pinned,
            "bytes": held[adapter_id].nbytes if adapter_id in held else None,
            "last_used": histories[adapter_id].last_used if adapter_id in histories else None,
        }
        for adapter_id in registry.adapters
    }


def is_leaving(engine: LLMEngine, adapter_id: int) -> bool:
    """Whether an adapter is being unloaded, and waits for the last requests that use it."""
    adapter = None if engine.adapters is None else engine.adapters.adapters.get(adapter_id)
    return adapter is not None and adapter.leaving


def newest_steps(engine: LLMEngine, most: int) -> tuple[list[StepRecord], dict[str, int]]:
    """The records of the last steps, and what their numbers are out of (`room`)."""
    return engine.trace.records[-most:], room(engine)
