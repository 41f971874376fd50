"""One step as a trace record, and whom it passed over. It listens to an engine's steps; no decision asks it."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

from minivllm.core.output import MAX_LORAS, NO_BLOCKS, SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler, first_come_first_served, is_full
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.core import EngineCore
from minivllm.observe.trace import SlotEvent, StepRecord, Trace, TraceRow, TraceSkip

logger = logging.getLogger(__name__)

# Of a queue with thousands a record names the first, and as few of those that were passed over.
MAX_NAMED = 32


class Recorder:
    """Keeps what every step of an engine did, and logs it; one of the engine's `listeners`.

    trace   the records
    """

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.trace = Trace(capacity=10_000, max_bytes=64 * 2**20)
        self._started = engine.clock()

    def __call__(self, output: SchedulerOutput) -> None:
        scheduler, adapters = self.engine.scheduler, self.engine.adapters
        seconds = self.engine.clock() - self._started
        self.trace.append(record_step(self.engine.metrics.steps, seconds, output, scheduler, adapters))
        log_step(output, scheduler, adapters.name_of if adapters else str)


def room(engine: EngineCore) -> dict[str, int]:
    """What the numbers of a record are out of.

    adapters         that memory may hold
    slot_bytes       of all slots
    kv_blocks, kv_block_bytes   of the KV cache
    """
    found = {
        "kv_blocks": engine.scheduler.kv_cache.block_pool.num_usable_blocks,
        "kv_block_bytes": engine.runner.kv_block_bytes,
    }
    if engine.adapters is not None:
        manager = engine.adapters.manager
        found |= {"adapters": manager.capacity, "slot_bytes": manager.get_memory_stats()["slot_buffers"]}
    return found


class Skip(NamedTuple):
    """A waiting request that a step passed over, and why: a reason of `SchedulerOutput.passed_over`."""

    request_id: str
    adapter_id: int
    reason: str


class WatchedLine:
    """The policy `first_come_first_served`, which also notes how far down the line a step came.

    A scheduler keeps no note of it: no decision needs it.
    """

    def __init__(self) -> None:
        self._step: Callable[[], SchedulerOutput | None] = lambda: None  # a step is not kept for its watcher
        self._asked: list[tuple[int, int] | int] = []

    def __call__(self, scheduler: Scheduler, output: SchedulerOutput) -> Iterator[Request]:
        self._step, self._asked = weakref.ref(output), []
        for request in first_come_first_served(scheduler, output):
            if not is_full(scheduler, output):
                self._asked.append(scheduler.waiting.place(request.adapter_id) or request.arrival_order)
            yield request

    def asked_in(self, output: SchedulerOutput) -> list[tuple[int, int] | int]:
        """Places in line of the requests that the latest step asked, in this order: who finds it full is not asked.

        A place is (since, arrival) where the adapter had waited for a slot, else the arrival. None of another step.
        """
        return self._asked if output is self._step() else []


def skips(scheduler: Scheduler, output: SchedulerOutput, most: int = MAX_NAMED) -> tuple[list[Skip], int]:
    """Who was passed over in a step, the first `most` of them, and how many in all; call it after `schedule`.

    They are all who stand in line before the place that the step came to, as the scheduler's `WatchedLine` has noted
    it. A scheduler with another policy has no such request, so none is named.
    """
    requests, count = _passed_over(scheduler, output)

    def skip(request: Request) -> Skip:
        reason = scheduler.why_wait(request) or output.passed_over.get(request.adapter_id, MAX_LORAS)
        return Skip(request.request_id, request.adapter_id, reason)

    return [skip(request) for request in islice(requests, most)], count


def _passed_over(scheduler: Scheduler, output: SchedulerOutput) -> tuple[Iterable[Request], int]:
    waiting = scheduler.waiting
    if output.halted_by is None:
        return waiting, len(waiting)
    line = scheduler.policy
    asked = line.asked_in(output) if isinstance(line, WatchedLine) else []
    if not asked:
        return (), 0
    reached, had_waited = asked[-1], isinstance(asked[-1], tuple)
    keys = waiting.passed_over if had_waited else waiting.requests
    # Who lacks blocks was asked, but not passed over.
    count = (keys.bisect_left if output.halted_by == NO_BLOCKS else keys.bisect_right)(reached)
    if had_waited:
        return (waiting.requests[arrival] for _, arrival in keys.islice(0, count)), count
    # Adapters that had waited for a slot were in line before all who stand by arrival.
    later = sorted(arrival for _, arrival in waiting.passed_over if arrival > reached)
    return map(waiting.requests.__getitem__, chain(islice(waiting.requests, count), later)), count + len(
        later
    )


def record_step(
    step: int,
    time_s: float,
    output: SchedulerOutput,
    scheduler: Scheduler,
    adapters: AdapterRegistry | None,
) -> StepRecord:
    """What the step did; call it after the forward pass and before the scheduler takes in its tokens."""
    slots, pinned, events = [], [], []
    pool = scheduler.kv_cache.block_pool
    if adapters is not None:
        slots = adapters.manager.lora_index_to_id
        pinned = sorted(adapters.pinned)
        events = adapters.manager.stats.drain_events()

    def name(adapter_id: int | None) -> str | None:
        return adapters.name_of(adapter_id) if adapter_id else None

    def of_kind(kind: str) -> list[SlotEvent]:
        return [SlotEvent(name(e.adapter_id), e.slot) for e in events if e.kind == kind]

    names = [*map(name, slots), None]
    waiting = [request.request_id for request in islice(scheduler.waiting, MAX_NAMED)]
    skipped, num_skipped = skips(scheduler, output)
    return StepRecord(
        step=step,
        time_s=time_s,
        rows=_rows(output, slots, names),
        slots=names[:-1],
        pinned=[name(adapter_id) for adapter_id in pinned],
        loads=[name(e.adapter_id) for e in events if e.kind == "load"],
        activations=of_kind("activate"),
        evictions=of_kind("evict"),
        skipped=[_trace_skip(s.request_id, name(s.adapter_id), s.reason) for s in skipped],
        preempted=list(output.preempted),
        waiting=waiting,
        running=len(output.running),
        more_skipped=num_skipped - len(skipped),
        more_waiting=len(scheduler.waiting) - len(waiting),
        drops=[name(e.adapter_id) for e in events if e.kind == "drop"],
        in_memory=len(adapters.manager) if adapters is not None else 0,
        kv_blocks=pool.num_usable_blocks - len(pool.free),
    )


def _rows(output: SchedulerOutput, slots: list[int | None], names: list[str | None]) -> list[TraceRow]:
    """Rows in the order of adapters.   names: of the adapters in slots, and behind them None for base"""
    slot_of = {adapter_id: slot for slot, adapter_id in enumerate(slots)} | {0: None}
    name_of = dict(zip([*slots, 0], names))
    rows = []
    for request, tokens, samples in sorted(output.scheduled, key=attrgetter("request.adapter_id")):
        cached, kind, adapter = 0, "chunk", request.adapter_id
        if request.request_id in output.cached_tokens:  # admitted, for the first time or after a preemption
            cached = output.cached_tokens[request.request_id]
            kind = "prefill" if samples else "chunk"
        elif samples and tokens == 1 and request.output_token_ids:
            kind = "decode"
        rows.append(_trace_row(request.request_id, name_of[adapter], slot_of[adapter], tokens, kind, cached))
    return rows


@lru_cache(maxsize=4096)
def _trace_row(*values: object) -> TraceRow:
    """A decode looks the same at every step, so one row stands for all of them: a trace holds many steps."""
    return TraceRow(*values)


@lru_cache(maxsize=4096)
def _trace_skip(*values: object) -> TraceSkip:
    """As with rows."""
    return TraceSkip(*values)


def log_step(output: SchedulerOutput, scheduler: Scheduler, name_of: Callable[[int], str]) -> None:
    """DEBUG: whom a step preempted and whom it passed over, with the reason; call it after `schedule`."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for request_id in output.preempted:
        adapter_id = scheduler.requests[request_id].adapter_id
        made_way = adapter_id in output.preempted_adapters
        reason = "its slot is needed" if made_way else "no KV blocks are left"
        _log_request(request_id, adapter_id, name_of, f"was preempted: {reason}")
    for skip in skips(scheduler, output)[0]:
        _log_request(skip.request_id, skip.adapter_id, name_of, f"is passed over: {skip.reason}")


def _log_request(request_id: str, adapter_id: int, name_of: Callable[[int], str], said: str) -> None:
    name = f"adapter '{name_of(adapter_id)}' (id {adapter_id})" if adapter_id else "the base model"
    logger.debug("request '%s' of %s %s", request_id, name, said)
