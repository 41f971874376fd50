"""What each call of an engine's `step` computed, and what became of adapters meanwhile: for whoever replays it."""

from collections import Counter
from collections.abc import Mapping

from benchmarks.measure import Step, run_step
from minivllm.assembly import LLMEngine
from minivllm.core.output import SchedulerOutput
from minivllm.lora.events import LoRAEvent
from minivllm.simulate.cost_model import StepWork, work_of

EVENTS = ("activate", "evict", "load", "drop")
STATE = ("kv_blocks", "pages", "running", "waiting")
COLUMNS = (
    *("started_s", "ms", "told", "done_s", "ahead"),
    *StepWork._fields,
    *("adapter_ids", "beside"),
    *EVENTS,
    *STATE,
)


class StepRecord:
    """Listens to an engine; `step` is its step, timed, with a row of what was launched in it.

    ranks   adapter id -> rank
    rows    one for each call, in the order of COLUMNS, without the first five
    ahead   whether the step that a call launched was read by the next call only
    """

    def __init__(self, engine: LLMEngine, ranks: Mapping[int, int]) -> None:
        self.engine, self.ranks = engine, ranks
        self.rows: list[str] = []
        self.ahead: list[bool] = []
        self.steps: list[Step] = []
        self._counts: Counter[str] = Counter()
        self._launched: SchedulerOutput | None = None
        self._adapters = ""
        engine.listeners.append(self._step_launched)
        if engine.adapters is not None:
            engine.adapters.manager.listeners.append(self._heard)

    def close(self) -> None:
        """Listen no longer."""
        self.engine.listeners.remove(self._step_launched)
        if self.engine.adapters is not None:
            self.engine.adapters.manager.listeners.remove(self._heard)

    def step(self) -> bool:
        """One step. False, and there is no row, if nothing was launched and nobody was told anything."""
        self._launched, self._work = None, StepWork()
        step = run_step(self.engine)
        if self._launched is None and not step.emitted:
            return False
        self.steps.append(step)
        self.ahead.append(getattr(self.engine.core, "unread", None) is not None)
        self.rows.append(self._row())
        self._counts.clear()
        return True

    def _step_launched(self, output: SchedulerOutput) -> None:
        self._launched, self._work = output, work_of(output, self.ranks)

    def _heard(self, event: LoRAEvent) -> None:
        self._counts[event.kind] += 1

    def _row(self) -> str:
        output = self._launched or SchedulerOutput()
        adapters = sorted({entry.request.adapter_id for entry in output.scheduled} - {0})
        named = ",".join(map(str, adapters)) or "-"
        shown, self._adapters = "=" if named == self._adapters else named, named
        beside = ",".join(map(str, output.prefetch)) or "-"
        counts = [self._counts[kind] for kind in EVENTS]
        return " ".join(
            [*(f"{each:g}" for each in self._work), shown, beside, *map(str, counts), *self._state()]
        )

    def _state(self) -> list[str]:
        scheduler = self.engine.scheduler
        pool = scheduler.kv_cache.block_pool
        adapters = self.engine.adapters
        pages = getattr(adapters and adapters.manager.punica_wrapper, "pool", None)
        held = sum(map(len, pages.ledger.held.values())) if pages is not None else 0
        used = pool.num_usable_blocks - len(pool.free)
        return [str(n) for n in (used, held, len(scheduler.running), len(scheduler.waiting))]


def facts(engine: LLMEngine, ranks: Mapping[int, int]) -> dict[str, object]:
    """What an engine has before its first step.

    max_lora_wait_steps               as configured
    graph_sizes                       tokens of the graphs for steps with prompts
    kv_blocks, blocks_a_page, pages   of memory; 0 pages where adapters have slots of one size
    max_loras, max_cpu_loras          slots, and adapters that memory may hold
    in_memory, in_slots               ids of the adapters that are there, the one used longest ago first
    ranks                             of adapters 1, 2, ..
    """
    mixed = getattr(engine.runner.graphs, "mixed", [])
    found: dict[str, object] = {
        "max_lora_wait_steps": engine.config.scheduler_config.max_lora_wait_steps,
        "graph_sizes": [shape.tokens for shape in mixed],
        "kv_blocks": engine.runner.num_blocks,
        "blocks_a_page": getattr(engine.runner.memory_plan, "blocks_a_page", 0),
    }
    if engine.adapters is None:
        return found
    manager = engine.adapters.manager
    pages = getattr(manager.punica_wrapper, "pool", None)
    return found | {
        "pages": 0 if pages is None else pages.ledger.count,
        "max_loras": manager.lora_slots,
        "max_cpu_loras": manager.capacity,
        "in_memory": list(manager.list_adapters()),
        "in_slots": list(manager.list_active_adapters()),
        "ranks": list(ranks.values()),
    }


def as_text(record: StepRecord, start: float) -> dict[str, list[str]]:
    """COLUMNS, and a line for each call of `step` that did anything.

    started_s, ms   when the call began, seconds after the start, and what it took
    told            requests that got a token in it: in a call that ran ahead, those of the step before
    done_s          when the tokens of the step launched in it were there: after the next call, if it ran ahead
    ahead           1 if it ran ahead
    steps .. admitted   the work of the step launched in it, see `StepWork`
    adapter_ids, beside  ids of the step's adapters, and of those copied while it ran; "=" as in the line before
    activate .. drop    of how many adapters that was told since the call before
    kv_blocks, pages    in use by requests, pages by adapters, too; pages that adapters have
    running, waiting    requests
    """
    ended = [step.ended - start for step in record.steps]
    lines = []
    for i, (step, ahead, row) in enumerate(zip(record.steps, record.ahead, record.rows)):
        done = ended[min(i + ahead, len(ended) - 1)]
        times = (
            f"{step.started - start:.4f} {1e3 * step.seconds:.2f} {len(step.emitted)} {done:.4f} {ahead:d}"
        )
        lines.append(f"{times} {row}")
    return {"step_columns": list(COLUMNS), "steps": lines}
