"""Requests in, one step at a time, outputs out. Stands for vllm/v1/engine/core.py (v0.22.1)."""

from labs.kit.overlay import Todo
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.input_processor import LimitsOf, base_limits
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.output_processor import OutputProcessor, RequestState
from minivllm.engine.outputs import RequestOutput
from minivllm.engine.parallel_sampling import ParallelSampling, ParentRequest
from minivllm.errors import all_pinned, blamed_adapter, log_unexpected, recoverable
from minivllm.layers.sampler import Logprob
from minivllm.worker.model_runner import Executor
from minivllm.worker.row_sampler import PendingStep, Sampled


class NewRequest(NamedTuple):
    """A request that may be added: its parent if it is for several answers, and what is kept of each of these.

    found   of its adapter, by the registry's `examine`
    """

    request: Request
    parent: ParentRequest | None
    states: list[RequestState]
    found: Mapping[str, Any]


class EngineCore:
    """What an engine is made of, and one step of it. vLLM: `EngineCore`, which has no outputs.

    executor    runs steps; `runner` is its model runner in this process
    scheduler   decides them
    adapters    the records of adapters; None for an engine without LoRA
    tokenizer   a transformers fast tokenizer; None = answers have no text
    clock       seconds; everything that has a time has it from here
    limits_of   says what prompts of an adapter may be: as the base model's, or otherwise for what options found

    parallel    the requests for more than one answer
    pending     outputs that were made, and that no caller has yet
    listeners   hear of every step that was launched, before its tokens are there; no decision asks them

    Another way to run steps is a class of its own. It overrides `_launch`, `_sample`, `_finish` and `_fail`, which say
    what they promise, and adds to the public methods what it has to do before.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        scheduler: Scheduler,
        adapters: AdapterRegistry | None = None,
        tokenizer: Any = None,
        clock: Callable[[], float] = time.monotonic,
        limits_of: LimitsOf = base_limits,
    ) -> None:
        self.config, self.tokenizer, self.clock, self.limits_of = config, tokenizer, clock, limits_of
        self.executor, self.runner = executor, executor.runner
        self.scheduler, self.adapters = scheduler, adapters
        self.output_processor = OutputProcessor(tokenizer, clock)
        self.parallel = ParallelSampling(scheduler, self.output_processor)
        self.metrics = EngineMetrics()
        self.pending: list[RequestOutput] = []
        self.listeners: list[Callable[[SchedulerOutput], None]] = []
        self._in_pass: SchedulerOutput | None = None  # the step that is being computed
        self._pass_began = 0.0
        self._left_by: set[int] = set()  # adapters of requests that ended in this call

    # ---- requests come and go -------------------------------------------------------------------------------

    def check_request(
        self,
        request: Request,
        text: str | None = None,
        tokenizer: Any = None,
        found: Mapping[str, Any] = {},
    ) -> NewRequest:
        """What `add_request` takes; nothing has changed. ValueError: the id is in use, or the request can never run.
        AllPinned: every slot is pinned for another adapter.

        text        of its prompt, if it has one
        tokenizer   that writes its answer, None = the engine's
        found       of its adapter, as the registry has examined it
        """
        n = request.sampling_params.n
        if n > 1 or self.parallel.parents or self.pending:
            self.parallel.claim(request.request_id, n, self.pending)
        self.scheduler.check_request(request)
        if request.lora_request is not None:
            others = self.adapters.pinned - {request.adapter_id}
            if len(others) >= self.adapters.manager.lora_slots:
                raise all_pinned(request.lora_request.lora_name, len(others))
        parent = self.parallel.new_parent(request) if n > 1 else None
        own = [request] if parent is None else parent.children
        states = [self.output_processor.new_state(child, text, tokenizer) for child in own]
        return NewRequest(request, parent, states, found)

    def add_request(self, new: NewRequest) -> None:
        """Queue a request; one for n answers becomes n requests."""
        generation = 0
        if (lora_request := new.request.lora_request) is not None:
            owner = f"request '{new.request.request_id}'"
            lora_request, generation = self.adapters.register(lora_request, owner, new.found)
        if new.parent is not None:
            self.parallel.add(new.parent)
        for state in new.states:
            state.request.lora_request, state.request.adapter_generation = lora_request, generation
            self.scheduler.add_request(state.request)
            self.output_processor.states[state.request.request_id] = state

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without an output; unknown and finished ids are passed over."""
        parents = list(request_ids)
        ids = self.parallel.ids_within(parents)
        for request in self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED):
            self._forget(request)
        for request_id in ids:
            self.output_processor.drop(request_id)
        self.pending = [output for output in self.pending if output.request_id not in ids]
        self.parallel.forget(parents)
        self._settle_what_was_left()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do, or to tell."""
        return bool(self.output_processor.states or self.pending)

    def knows(self, request_id: str) -> bool:
        """Whether an id is in use: its request has not had its last output."""
        return self.parallel.is_in_use(request_id, self.pending)

    def pin_lora(self, adapter_id: int) -> bool:
        """As `AdapterRegistry.pin_lora`, which may leave a running request without a slot."""
        return self.adapters.pin_lora(adapter_id)

    def update_lora(self, *args: Any, **options: Any) -> int:
        """As `AdapterRegistry.update_lora`, which may have running requests wait."""
        return self.adapters.update_lora(self.scheduler.preempt, *args, **options)

    # ---- a step ---------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One step; what is new of every request that got a token or ended.

        What one row or one adapter raises ends the requests concerned. What the whole pass raises ends the requests of
        the step: nothing of it was committed, and the others go on with the next one. All else is raised, and the core
        is of no use any more: half a step may have been decided.
        """
        with self.runner.cpu_threads.around_step():
            try:
                self._step(self.pending)
            except BaseException as error:
                self._fail_step(recoverable(error), self.pending)
        self._settle_what_was_left()
        outputs, self.pending = self.pending, []
        return self.parallel.merged(outputs)

    # region lab 7.4: one step of the engine
    # A blank page. What it promises: `lab api 7.4`, or labs/07_engine/contracts/7.4.md
    def _step(self, outputs: list[RequestOutput]) -> None:
        raise Todo("lab 7.4: one step of the engine")

    # endregion

    def _launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Start the pass of a step. From here on until `_end_pass` an error is the pass's."""
        self._in_pass, self._pass_began = scheduled, self.clock()
        return self.executor.launch_model(scheduled)

    def _sample(self, launched: PendingStep, outputs: list[RequestOutput]) -> Sampled:
        """Request id -> (token, logprobs) of all rows that can be sampled; requests of the others end."""
        sampled = self.executor.sample_tokens(launched)
        for request_id, error in launched.errors.items():
            self._fail([request_id], error, outputs)
        self._end_pass()
        return sampled

    def _end_pass(self) -> None:
        """The pass is through; how long it took says whether another number of CPU threads is to be tried."""
        seconds = self.clock() - self._pass_began
        self.runner.cpu_threads.observe_step(self._in_pass.total_num_scheduled_tokens, seconds)
        self._in_pass = None

    def _fail_step(self, error: BaseException, outputs: list[RequestOutput]) -> None:
        """End the requests of the adapter that raised this in a step, else those of the step whose pass did.

        Raise it again if neither did.
        """
        scheduled, self._in_pass = self._in_pass, None
        if scheduled is None:
            raise error
        self.executor.share_tokens()  # other ranks wait for these, and could not read an adapter meanwhile
        if adapter_id := blamed_adapter(error):
            self._fail_adapter(adapter_id, error, outputs)
        else:
            self._fail([entry.request.request_id for entry in scheduled.scheduled], error, outputs)

    def _settle_adapters(self, outputs: list[RequestOutput]) -> None:
        """Do the reloads and unloads whose time has come; end the requests that waited for a reload that failed."""
        if self.adapters is None or not self.adapters.noted:
            return
        self.adapters.settle()
        # Requests that end here may have stood in the way of the next reload, and that may fail as well.
        while failures := self.adapters.failures():
            for (adapter_id, generation), error in failures.items():
                self._fail(self._users(adapter_id, generation), error, outputs)
                self.adapters.answered_for((adapter_id, generation))
            self._settle_what_was_left()

    def _prepare_adapters(self, scheduled: SchedulerOutput, outputs: list[RequestOutput]) -> bool:
        """Read the adapters that the step needs; end the requests of those that cannot be. True if there were any.

        A request that ran before has its adapter in memory, so a step that admits none, with none pinned, reads none.
        """
        if self.adapters is None or not (scheduled.cached_tokens or self.adapters.pinned):
            return False
        wanted = {request.adapter_id: request.lora_request for request in scheduled.running}
        failures = self.adapters.prepare(wanted.values())
        for adapter_id, error in failures.items():
            self._fail_adapter(adapter_id, error, outputs)
        return bool(failures)

    def _users(self, adapter_id: int, generation: int | None = None) -> list[str]:
        """Ids of the unfinished requests of an adapter, or of one generation of it."""
        of_adapter = (r for r in self.scheduler.requests.values() if r.adapter_id == adapter_id)
        return [r.request_id for r in of_adapter if generation in (None, r.adapter_generation)]

    def _fail_adapter(self, adapter_id: int, error: BaseException, outputs: list[RequestOutput]) -> None:
        """End the requests that run with the adapter: those of its earliest generation, since no others may run."""
        earliest = min(self.scheduler.in_flight.get(adapter_id, ()), default=None)
        self._fail(self._users(adapter_id, earliest), error, outputs)
        self.adapters.could_not_be_read(adapter_id)

    def _fail(self, request_ids: list[str], error: BaseException, outputs: list[RequestOutput]) -> None:
        """End requests with an error, each with an output that says so."""
        sentence = log_unexpected(error, request_ids)
        for request in self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ERROR, sentence):
            self._finish(request, outputs)

    def _finish(
        self, request: Request, outputs: list[RequestOutput], logprobs: dict[int, Logprob] | None = None
    ) -> None:
        """Make a request's output; forget the request if that was its last."""
        output = self.output_processor.process(request, logprobs)
        outputs.append(output)
        self.output_processor.delivered(output)
        if output.finished:
            # What the text ends, a stop string or an error, the scheduler does not know of yet.
            self.scheduler.finish_requests(request.request_id, request.status, request.error)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self.runner.forget_request(request.request_id)
        self.metrics.observe_finished(request.status.finish_reason)
        if request.adapter_id:
            self._left_by.add(request.adapter_id)

    def _settle_what_was_left(self) -> None:
        """Do what waited for the ends of requests, once all outputs are made."""
        for adapter_id in self._left_by:
            self.adapters.request_ended(adapter_id)
        self._left_by.clear()
