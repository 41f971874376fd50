"""One step of the engine. Stands for vllm/v1/engine/core.py (v0.22.1)."""

from labs.kit.overlay import Todo
import time
from collections.abc import Callable
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.engine.input_processor import InputProcessor
from minivllm.engine.metrics import EngineMetrics
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.outputs import RequestOutput
from minivllm.engine.parallel_sampling import ParallelSampling
from minivllm.engine.parts import MakeParts, plain_parts
from minivllm.errors import log_unexpected
from minivllm.layers.sampler import Logprob
from minivllm.worker.row_sampler import PendingStep, Sampled


class EngineCore:
    """Takes one step at a time. vLLM: `EngineCore`, which has no outputs.

    It serves alone where nothing goes wrong. `GuardedCore` guards it against errors, other threads and Ctrl-C.

    tokenizer   a transformers fast tokenizer; None = prompts come as token ids and answers have no text
    clock       seconds; everything that has a time has it from here
    executor    runs steps; `runner` is its model runner in this process
    adapters    None for an engine without LoRA
    parallel    the requests for more than one answer
    listeners   hear of every step that was launched, before its tokens are there; no decision asks them
    """

    make_parts: MakeParts = staticmethod(plain_parts)

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Any = None,
        warm_up: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.tokenizer, self.clock = config, tokenizer, clock
        parts = self.make_parts(config, tokenizer, warm_up)
        self.executor, self.runner = parts.executor, parts.executor.runner
        self.scheduler, self.adapters = parts.scheduler, parts.adapters
        self.input_processor = InputProcessor(config.model_config, tokenizer)
        self.output_processor = OutputProcessor(tokenizer, clock)
        self.parallel = ParallelSampling(self.scheduler, self.output_processor)
        self.metrics = EngineMetrics()
        self.listeners: list[Callable[[SchedulerOutput], None]] = []
        self._left_by: set[int] = set()  # adapters of requests that ended in this call

    def step(self) -> list[RequestOutput]:
        """One step; what is new of every request that got a token or ended."""
        outputs: list[RequestOutput] = []
        self._step(outputs)
        self._settle_what_was_left()
        return outputs

    # region lab 7.4: one step of the engine
    def _step(self, outputs: list[RequestOutput]) -> None:
        """One step. What is new of a request goes into `outputs` at once: it is not lost if the rest fails.

        First reloads and unloads are settled (`_settle_adapters`), then the scheduler decides. The output
        processor hears of each request that was admitted (`mark_scheduled`): `cached_tokens` has their ids. The
        refused are finished (`_finish`). A step in which nothing is scheduled ends here.

        Then the adapters are read (`_prepare_adapters`). Requests whose adapter cannot be loaded end with
        finish_reason "error". The step is dropped with them, and the others go on with the next one.

        It is launched (`_launch`), and what was launched is sampled (`_sample`). In between the `listeners` hear of the
        step, and the adapters of `prefetch` are copied. Only when the tokens are there is anything committed:
        `update_from_output` takes request id -> [token]. Whoever it names gets an output with its logprobs.
        `metrics.observe_step` counts the step, the seconds from its beginning, and those from launch to tokens.
        """
        raise Todo("lab 7.4: one step of the engine")

    # endregion

    def _launch(self, scheduled: SchedulerOutput) -> PendingStep:
        return self.executor.launch_model(scheduled)

    def _sample(self, launched: PendingStep, outputs: list[RequestOutput]) -> Sampled:
        """Request id -> (token, logprobs) of all rows that can be sampled; requests of the others end."""
        sampled = self.executor.sample_tokens(launched)
        for request_id, error in launched.errors.items():
            self._fail([request_id], error, outputs)
        return sampled

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

        Whoever ran before has its adapter in memory. So a step that admits nobody, with nothing pinned, reads nothing.
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
        """Do what waited for the ends of requests, once all outputs are made.

        Until then a Ctrl-C may take a request back that has its last token but no output.
        """
        for adapter_id in self._left_by:
            self.adapters.request_ended(adapter_id)
        self._left_by.clear()
