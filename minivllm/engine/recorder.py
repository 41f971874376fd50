"""One step as a trace record."""

from functools import lru_cache
from itertools import islice
from operator import attrgetter

from minivllm.core.output import ScheduledRequest, SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.trace import SlotEvent, StepRecord, TraceRow, TraceSkip

# Of a queue with thousands a record names the first; the scheduler names as few of those it passes over.
MAX_WAITING_NAMED = 32


def record_step(
    step: int,
    time_s: float,
    output: SchedulerOutput,
    scheduler: Scheduler,
    adapters: AdapterRegistry | None,
) -> StepRecord:
    """What the step did; call it after the forward pass and before the scheduler takes in its tokens."""
    slots, pinned, events = [], [], []
    if adapters is not None:
        slots = adapters.manager.lora_index_to_id
        pinned = sorted(adapters.pinned_adapters())
        events = adapters.manager.stats.drain_events()

    def name(adapter_id: int | None) -> str | None:
        return adapters.name_of(adapter_id) if adapter_id else None

    def of_kind(kind: str) -> list[SlotEvent]:
        return [SlotEvent(name(e.adapter_id), e.slot) for e in events if e.kind == kind]

    def row(entry: ScheduledRequest) -> TraceRow:
        request = entry.request
        slot = slots.index(request.adapter_id) if request.adapter_id else None
        cached = output.cached_tokens.get(request.request_id)
        kind = _kind(entry, admitted=cached is not None)
        adapter = name(request.adapter_id)
        return _trace_row(request.request_id, adapter, slot, entry.num_new_tokens, kind, cached or 0)

    waiting = [request.request_id for request in islice(scheduler.waiting, MAX_WAITING_NAMED)]
    return StepRecord(
        step=step,
        time_s=time_s,
        rows=[row(entry) for entry in sorted(output.scheduled, key=attrgetter("request.adapter_id"))],
        slots=[name(adapter_id) for adapter_id in slots],
        pinned=[name(adapter_id) for adapter_id in pinned],
        loads=[name(e.adapter_id) for e in events if e.kind == "load"],
        activations=of_kind("activate"),
        evictions=of_kind("evict"),
        skipped=[_trace_skip(s.request_id, name(s.adapter_id), s.reason) for s in output.skipped],
        preempted=list(output.preempted),
        waiting=waiting,
        running=len(output.running),
        more_skipped=output.num_skipped - len(output.skipped),
        more_waiting=len(scheduler.waiting) - len(waiting),
    )


@lru_cache(maxsize=4096)
def _trace_row(*values: object) -> TraceRow:
    """A decode looks the same at every step, so one row stands for all of them: a trace holds many steps."""
    return TraceRow(*values)


@lru_cache(maxsize=4096)
def _trace_skip(*values: object) -> TraceSkip:
    """As with rows."""
    return TraceSkip(*values)


def _kind(entry: ScheduledRequest, admitted: bool) -> str:
    """admitted: the request joined the batch in this step, for the first time or after a preemption"""
    request: Request = entry.request
    if admitted:
        return "prefill" if entry.samples else "chunk"
    answering = entry.num_new_tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens
    return "decode" if entry.samples and answering else "chunk"
