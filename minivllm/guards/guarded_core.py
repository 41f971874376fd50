"""An engine's steps among threads, errors and Ctrl-C. Stands for nothing in vLLM (v0.22.1); its engine dies of them."""

from collections.abc import Collection, Iterable
from typing import Any

from minivllm.ahead.run_ahead import UNREAD, RunAhead
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.engine.core import EngineCore
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import blamed_adapter, recoverable
from minivllm.guards.mending import mend
from minivllm.guards.turns import Turns, in_turn
from minivllm.layers.sampler import Logprob
from minivllm.worker.row_sampler import PendingStep, Sampled


class GuardedCore(EngineCore):
    """A core that one thread at a time may call. A call that breaks off loses no request, no token and no output."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turns = Turns("engine", self._mend)
        # Made in a step that has not returned, or for other callers.
        self._undelivered: list[RequestOutput] = []
        self._launched: SchedulerOutput | None = None  # the step that is being computed
        self._launched_at = 0.0
        self._failed_steps = 0  # in a row
        # None = every step is read before the next one is scheduled.
        self._ahead: RunAhead | None = None
        if self.config.scheduler_config.async_scheduling and self.runner.graphs.hold_most_steps:
            self._ahead = RunAhead(self)

    def step(self, of: Collection[str] | None = None) -> list[RequestOutput]:
        """Schedule, run, sample; what is new of every request that got a token or ended. vLLM: the same name.

        of    return the outputs of these requests only; those of others come with the next call that wants them

        What one request or its adapter raises ends that request. What the whole step raises is raised here once. No
        token is lost, and the next call takes the step again. If that fails, too, the requests of the step end with the
        error. Outputs of a call that raised come with the next one's.
        """
        outputs: list[RequestOutput] = []
        try:
            with self._turns.take(errors_leave_it_whole=False):
                try:
                    with self.runner.cpu_threads.around_step():
                        self._step(self._undelivered)
                    self._failed_steps = 0
                except BaseException as error:
                    self._end_who_is_at_fault(recoverable(error))
                self._settle_what_was_left()
                # In one line each: a Ctrl-C may come between any two.
                if of is None:
                    outputs, self._undelivered = self._undelivered, []
                else:
                    outputs, self._undelivered = self._split(of)
            return self.parallel.merged(outputs)
        except BaseException:
            # A Ctrl-C on the way out: the caller has nothing of them.
            self._undelivered[:0] = outputs
            raise

    @in_turn(refuses=False)
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without an output; unknown and finished ids are passed over."""
        parents = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        if self._ahead is not None:
            self._ahead.answer(self._undelivered)
        ids = self.parallel.ids_within(parents)
        for request_id in ids:
            # Before all else: `mend` brings back every request that the output processor knows.
            self.output_processor.drop(request_id)
        for request in self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED):
            self._forget(request)
        self._settle_what_was_left()
        self._undelivered = [o for o in self._undelivered if o.request_id not in ids]
        self.parallel.forget(parents)
        if not self.has_unfinished_requests():
            self._failed_steps = 0  # whatever fails next is somebody else's

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do, or to tell."""
        return bool(self.output_processor.states or self._undelivered)

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor.states)

    def knows(self, request_id: str) -> bool:
        """Whether an id is in use: its request has not had its last output."""
        return self.parallel.is_in_use(request_id, self._undelivered)

    def _split(self, of: Collection[str]) -> tuple[list[RequestOutput], list[RequestOutput]]:
        """Outputs that no caller has yet: those of these requests, and those of others."""
        split: tuple[list[RequestOutput], list[RequestOutput]] = [], []
        for output in self._undelivered:
            split[self.parallel.asked_as(output.request_id) not in of].append(output)
        return split

    def _step(self, outputs: list[RequestOutput]) -> None:
        ahead = None if self._ahead is None else self._ahead.step
        super()._step(outputs)
        if ahead is not None and self._ahead.step is ahead:
            self._ahead.answer(outputs)  # nothing was launched after it

    def _launch(self, scheduled: SchedulerOutput) -> PendingStep:
        self._launched, self._launched_at = scheduled, self.clock()
        if self._ahead is not None:
            self._ahead.before_launch(scheduled)
        return super()._launch(scheduled)

    def _sample(self, launched: PendingStep, outputs: list[RequestOutput]) -> Sampled:
        sampled = None if self._ahead is None else self._ahead.sample(launched, outputs)
        if sampled is None:
            sampled = super()._sample(launched, outputs)
        seconds = self.clock() - self._launched_at
        self.runner.cpu_threads.observe_step(self._launched.total_num_scheduled_tokens, seconds)
        self._launched = None
        return sampled

    def _finish(
        self, request: Request, outputs: list[RequestOutput], logprobs: dict[int, Logprob] | None = None
    ) -> None:
        if logprobs is UNREAD:
            self._ahead.postpone(request)
            return
        if self._ahead is not None:
            self._ahead.before_output(request, outputs)
        super()._finish(request, outputs, logprobs)

    def _fail(self, request_ids: list[str], error: BaseException, outputs: list[RequestOutput]) -> None:
        if self._ahead is not None:
            self._ahead.answer(outputs)  # no token is lost
        super()._fail(request_ids, error, outputs)

    def _end_who_is_at_fault(self, error: BaseException) -> None:
        """End the requests of the adapter that made a step fail.

        If no adapter did, raise the error. The second time in a row end the requests of the step instead.
        """
        launched, self._launched = self._launched, None
        if self._ahead is not None and self._ahead.step is not None:
            self._mend()
        if adapter_id := blamed_adapter(error):
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
            users = list(self.scheduler.requests)
        else:
            users = [scheduled.request.request_id for scheduled in launched.scheduled]
        return self._fail(users, error, self._undelivered)

    def _mend(self) -> None:
        """After a call that broke off: every request goes on from its last output, delivered or about to be."""
        self._launched = None
        if self._ahead is not None:
            self._ahead.step = None
        self._left_by.clear()
        mend(self, self._undelivered)
