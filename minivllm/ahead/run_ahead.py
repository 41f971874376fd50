"""The next step is launched before the tokens of this one are read. Stands for async scheduling (vLLM 0.22.1).

There it is vllm/v1/core/sched/async_scheduler.py. A GPU then always has a step to do while the host schedules,
and tells callers what is new.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm.ahead.tokens_ahead import TokensAhead
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus, check_stop
from minivllm.engine.core import EngineCore
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import id_in_use
from minivllm.layers.sampler import Logprob
from minivllm.worker.row_sampler import PendingStep, Sampled

# In the place of a stand-in's logprobs: its request has no output yet, `RunAhead.answer` makes it.
UNREAD: dict[int, Logprob] = {}


@dataclass
class StepAhead:
    """A step whose tokens the host does not know.

    request_ids  of its rows
    wait         gives the rows' tokens and logprobs
    answered     requests that were given a stand-in, which is their last token
    ended        those of them that the scheduler is through with. They count as in flight until the tokens are there:
                 if the step is lost it is computed again, with the weights that it had
    sampled      what `wait` gave, once the tokens have taken the places of the stand-ins
    """

    request_ids: frozenset[str]
    wait: Callable[[], Sampled]
    answered: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    sampled: Sampled | None = None


class RunAhead:
    """One step ahead: what an engine does between a launch and the next.

    A step is committed with stand-ins as soon as it is launched, so that the next one can be scheduled. Requests whose
    last token it is by number are then out of the scheduler. After the next launch its tokens are read, and answers
    are made. Whoever they end has a row too many in that next step. Nobody hears of that row, and its blocks are given
    to others only in later steps.

    tokens   leaves a step's tokens on the device
    step     None = the host knows every token
    """

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.tokens = TokensAhead(engine.executor)
        self.step: StepAhead | None = None

    def check_id(self, request_id: str) -> None:
        """ValueError for the id of a request whose last token is still to be read: the scheduler no longer knows it."""
        if self.step is not None and request_id in {request.request_id for request in self.step.answered}:
            raise id_in_use(request_id)

    def before_launch(self, scheduled: SchedulerOutput) -> None:
        """Read tokens that the step cannot look up on the device."""
        if self.step is not None and not self.tokens.takes_stand_ins(scheduled):
            self._read(self.step)

    def sample(self, launched: PendingStep, outputs: list[RequestOutput]) -> Sampled | None:
        """Answer the step before. Then stand-ins for the step launched now, or None if it is to be sampled."""
        self.answer(outputs)
        wait = self.tokens.leave(launched)
        if wait is None:
            return None
        ids = [request.request_id for request in launched.requests]
        self.step = StepAhead(frozenset(ids), wait)
        return {request_id: (-1 - row, UNREAD) for row, request_id in enumerate(ids)}

    def postpone(self, request: Request) -> None:
        """Its output is made when the stand-in that it was given has been read."""
        self.step.answered.append(request)
        if request.is_finished:
            self.step.ended.append(request)
            self.engine.scheduler.count_in_flight(request, 1)

    def before_output(self, request: Request, outputs: list[RequestOutput]) -> None:
        """Answer the step before, if the request is of it: its output is about to be made."""
        if self.step is not None and request.request_id in self.step.request_ids:
            self.answer(outputs)

    def answer(self, outputs: list[RequestOutput]) -> None:
        """Wait for the tokens of the step before, and make the outputs of its requests.

        If it breaks off, the step is kept, and with it the need to mend.
        """
        step, engine = self.step, self.engine
        if step is None:
            return
        self._read(step)
        while step.ended:
            engine.scheduler.count_in_flight(step.ended.pop(), -1)
        for request in step.answered:
            # Who ended in the meantime has had an output, or wants none.
            if request.status not in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
                check_stop(request, engine.scheduler.max_model_len)
                EngineCore._finish(engine, request, outputs, step.sampled[request.request_id][1])
        self.step = None

    def _read(self, step: StepAhead) -> None:
        """Put tokens in the places of stand-ins."""
        if step.sampled is not None:
            return
        sampled = step.wait()
        for request in step.answered:
            token, _ = sampled[request.request_id]
            request.output_token_ids[-1] = request.all_token_ids[-1] = token
        step.sampled = sampled
