"""One step of the engine, and what is done when it fails. Stands for vllm/v1/engine/core.py (v0.22.1)."""

import time
from dataclasses import replace
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.engine.adapter_registry import AdapterRegistry
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.outputs import RequestOutput
from minivllm.engine.recorder import record_step
from minivllm.engine.trace import Trace
from minivllm.engine.turns import Turns
from minivllm.faults import adapter_at_fault, as_fault, told
from minivllm.layers.sampler import Logprob
from minivllm.worker.model_runner import ModelRunner, PendingStep


class EngineCore:
    """Scheduler, model runner and outputs, one step at a time. vLLM: `EngineCore`, which has no outputs.

    tokenizer   a transformers fast tokenizer; None = prompts come as token ids and answers have no text
    trace       what every step did
    """

    def __init__(self, config: EngineConfig, tokenizer: Any = None, warm_up: bool = True) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.runner = ModelRunner(config)
        if warm_up:
            self.runner.warm_up()
        self.scheduler = Scheduler(
            config.scheduler_config,
            replace(config.cache_config, num_blocks=self.runner.num_blocks),
            config.lora_config,
            max_model_len=config.model_config.max_model_len,
            adapter_identity=self._adapter_identity,
            pinned_adapters=self._pinned_adapters,
            may_run=self._may_run,
            can_prefetch=self.runner.can_prefetch_lora,
        )
        self.adapters = None
        if config.lora_config is not None:
            self.adapters = AdapterRegistry(
                self.scheduler, self.runner.lora_manager, with_tokenizers=tokenizer is not None
            )
        self.output_processor = OutputProcessor(tokenizer)
        self.metrics = EngineMetrics()
        self.trace = Trace(capacity=10_000, max_bytes=64 * 2**20)
        self._started = time.monotonic()
        self._turns = Turns("engine", self._mend)
        self._undelivered: list[RequestOutput] = []  # made in a step that has not returned
        self._launched: SchedulerOutput | None = None  # the step that is being computed
        self._launched_at = 0.0
        self._failed_steps = 0  # in a row
        self._left_by: set[int] = set()  # adapters of requests that ended in this call

    def _adapter_identity(self, adapter_id: int) -> int | None:
        """A number that stands for the weights behind an id right now; None while they are not in memory."""
        lora = self.adapters.manager.get_adapter(adapter_id)
        return lora and lora.load_id

    def _pinned_adapters(self) -> set[int]:
        return self.adapters.pinned_adapters() if self.adapters else set()

    def _may_run(self, request: Request) -> str | None:
        return self.adapters.may_run(request) if self.adapters else None

    # ---- one step -------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule, run, sample; what is new of every request that got a token or ended. vLLM: the same name.

        What one request or its adapter raises ends that request. What the whole step raises is raised here once: no
        token is lost, and the next call takes the step again. If that fails, too, the requests of the step end with the
        error. Outputs of a call that raised come with the next one's.
        """
        threads = self.runner.cpu_threads
        outputs: list[RequestOutput] = []
        try:
            with self._turns.take(errors_leave_it_whole=False):
                threads.before_step()
                try:
                    with threads.in_use():
                        self._step(self._undelivered)
                    self._failed_steps = 0
                except BaseException as error:
                    self._end_who_is_at_fault(as_fault(error))
                self._settle_what_was_left()
                outputs, self._undelivered = self._undelivered, []
            return outputs
        except BaseException:
            # A Ctrl-C on the way out: the caller has nothing of them.
            self._undelivered[:0] = outputs
            raise

    # region lab 7.4: one step of the engine
    def _step(self, outputs: list[RequestOutput]) -> None:
        """One step; what is new of a request goes into `outputs` at once, and so is not lost if the rest fails.

        First reloads and unloads are settled (`_settle_adapters`), then the scheduler decides. The output
        processor hears who was admitted (`mark_scheduled`), and the refused are finished (`_finish`). A step in
        which nothing is scheduled ends here.

        Then the adapters are read (`_prepare_adapters`). Requests whose adapter cannot be loaded end with
        finish_reason "error", and the step is dropped with them: the others go on with the next one.

        Between the launch (`_launch`) and the sampling (`_sample`) of what was launched the step is recorded
        (`_record`) and the adapters of `prefetch` are copied. Only when the tokens are there is anything committed:
        `update_from_output` takes request id -> [token], and whoever it names gets an output with its logprobs.
        `metrics.observe_step` counts the step, the seconds from its beginning, and those from launch to tokens.
        """
        started = time.perf_counter()
        self._settle_adapters(outputs)
        scheduled = self.scheduler.schedule()
        self.output_processor.mark_scheduled(scheduled.cached_tokens)
        for request in scheduled.refused:
            self._finish(request, outputs)
        if not scheduled.scheduled:
            return
        if self._prepare_adapters(scheduled, outputs):
            return
        forward_started = time.perf_counter()
        launched = self._launch(scheduled)
        # What comes now, a GPU's computing hides.
        self._record(scheduled, time.monotonic())
        for adapter_id in scheduled.prefetch:
            self.runner.prefetch_lora(adapter_id)
        sampled = self._sample(launched, outputs)
        forward_seconds = time.perf_counter() - forward_started
        tokens = {request_id: [token] for request_id, (token, _) in sampled.items()}
        for request in self.scheduler.update_from_output(scheduled, tokens):
            self._finish(request, outputs, sampled[request.request_id][1])
        self.metrics.observe_step(time.perf_counter() - started, forward_seconds)

    # endregion

    def _launch(self, scheduled: SchedulerOutput) -> PendingStep:
        self._launched, self._launched_at = scheduled, time.perf_counter()
        return self.runner.launch_model(scheduled)

    def _sample(
        self, launched: PendingStep, outputs: list[RequestOutput]
    ) -> dict[str, tuple[int, dict[int, Logprob] | None]]:
        """Request id -> (token, logprobs) of all rows that can be sampled; requests of the others end."""
        sampled = self.runner.sample_tokens(launched)
        seconds = time.perf_counter() - self._launched_at
        self.runner.cpu_threads.observe_step(self._launched.total_num_scheduled_tokens, seconds)
        self._launched = None
        for request_id, error in launched.errors.items():
            self._fail([request_id], error, outputs)
        return sampled

    def _settle_adapters(self, outputs: list[RequestOutput]) -> None:
        """Do the reloads and unloads whose time has come; end the requests that waited for a reload that failed."""
        if self.adapters is None:
            return
        self.adapters.settle()
        # Requests that end here may have stood in the way of the next reload, and that may fail as well.
        while failures := self.adapters.failures():
            for (adapter_id, generation), error in failures.items():
                waiting = [
                    request.request_id
                    for request in self.scheduler.requests.values()
                    if (request.adapter_id, request.adapter_generation) == (adapter_id, generation)
                ]
                self._fail(waiting, error, outputs)
                self.adapters.answered_for((adapter_id, generation))
            self._settle_what_was_left()

    def _prepare_adapters(self, scheduled: SchedulerOutput, outputs: list[RequestOutput]) -> bool:
        """Read the adapters that the step needs; end the requests of those that cannot be. True if there were any."""
        if self.adapters is None:
            return False
        wanted = {request.adapter_id: request.lora_request for request in scheduled.running}
        failures = self.adapters.prepare(wanted.values())
        for adapter_id, error in failures.items():
            self._fail_adapter(adapter_id, error, outputs)
        return bool(failures)

    def _fail_adapter(self, adapter_id: int, error: BaseException, outputs: list[RequestOutput]) -> None:
        users = [r.request_id for r in self.scheduler.requests.values() if r.adapter_id == adapter_id]
        self._fail(users, error, outputs)
        self.adapters.release_unused(adapter_id)

    def _fail(self, request_ids: list[str], error: BaseException, outputs: list[RequestOutput]) -> None:
        sentence = told(error, request_ids)
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
        """Do what waited for the ends of requests, once all outputs are made.

        Before, a request that has got its last token, but no output yet, may be taken back by a Ctrl-C.
        """
        for adapter_id in self._left_by:
            self.adapters.request_ended(adapter_id)
        self._left_by.clear()

    def _record(self, scheduled: SchedulerOutput, now: float) -> None:
        self.trace.append(
            record_step(self.metrics.steps, now - self._started, scheduled, self.scheduler, self.adapters)
        )

    # ---- what goes wrong in a step ----------------------------------------------------------------------------

    def _end_who_is_at_fault(self, error: BaseException) -> None:
        """End the requests of the adapter that made a step fail.

        If no adapter did: raise the error the first time, and end the requests of the step the second time in a row.
        """
        launched, self._launched = self._launched, None
        if adapter_id := adapter_at_fault(error):
            return self._fail_adapter(adapter_id, error, self._undelivered)
        self._failed_steps += 1
        if self._failed_steps == 1:
            # While a step is computed the scheduler is not at work: what it decided is dropped.
            if launched is not None:
                self._settle_what_was_left()
                self._turns.torn = False
            raise error
        self._failed_steps = 0
        if launched is None:
            self._mend()
        users = (
            self.scheduler.requests
            if launched is None
            else [s.request.request_id for s in launched.scheduled]
        )
        return self._fail(list(users), error, self._undelivered)

    def _mend(self) -> None:
        """After a call that broke off: every request goes on from its last output, delivered or about to be.

        What was done since then is done again. Requests that the output processor does not know are forgotten.
        """
        self._launched = None
        self._left_by.clear()
        requests = self.output_processor.rewind(self._undelivered)
        self.scheduler.reset(requests)
        self.runner.row_sampler.forget_all_but(request.request_id for request in requests)
        if self.adapters is not None:
            self.adapters.reset()
