"""The next step is launched before the tokens of this one are read. Stands for async scheduling (vLLM 0.22.1).

There it is vllm/v1/core/sched/async_scheduler.py. A GPU then always has a step to do while the host schedules,
and tells callers what is new.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.ahead.tokens_ahead import TokensAhead
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus, check_stop
from minivllm.engine.core import EngineCore, NewRequest
from minivllm.engine.outputs import RequestOutput
from minivllm.errors import id_in_use
from minivllm.layers.sampler import Logprob
from minivllm.worker.row_sampler import PendingStep, Sampled

# In the place of a stand-in's logprobs: its request has no output yet, `LookaheadCore._answer` makes it.
UNREAD: dict[int, Logprob] = {}


@dataclass
class UnreadStep:
    """A step that was launched, and whose tokens the host does not know.

    request_ids  of its rows
    wait         gives the rows' tokens and logprobs
    answered     requests that were given a stand-in, which is their last token
    sampled      what `wait` gave, once the tokens have taken the places of the stand-ins
    """

    request_ids: frozenset[str]
    wait: Callable[[], Sampled]
    answered: list[Request] = field(default_factory=list)
    sampled: Sampled | None = None

    def read(self) -> Sampled:
        """Wait for the tokens, and put them in the places of the stand-ins."""
        if self.sampled is None:
            self.sampled = self.wait()
            for request in self.answered:
                token, _ = self.sampled[request.request_id]
                request.output_token_ids[-1] = request.all_token_ids[-1] = token
        return self.sampled


class LookaheadCore(EngineCore):
    """A core that is one step ahead of its tokens.

    A step is committed with stand-ins as soon as it is launched, so that the next one can be scheduled. Requests whose
    last token it is by number are then out of the scheduler. After the next launch its tokens are read, and answers
    are made. A request that they end has a row too many in that next step. The row's token is dropped, and its blocks
    are given to others only in later steps. An error while a step's tokens are read is the device's, so it ends the
    engine.

    tokens   leaves a step's tokens on the device
    unread   the step launched last; None = the host knows every token
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tokens = TokensAhead(self.executor)
        self.unread: UnreadStep | None = None

    # ---- before what changes requests -------------------------------------------------------------------------

    def check_request(
        self,
        request: Request,
        text: str | None = None,
        tokenizer: Any = None,
        found: Mapping[str, Any] = {},
    ) -> NewRequest:
        # The scheduler no longer knows a request whose last token is still to be read.
        if self.unread is not None and request.request_id in {r.request_id for r in self.unread.answered}:
            raise id_in_use(request.request_id)
        return super().check_request(request, text, tokenizer, found)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._answer(self.pending)
        super().abort_requests(request_ids)

    def pin_lora(self, adapter_id: int) -> bool:
        # The next step ends the requests that lose their slot by this, and their last token must be read before that.
        self._answer(self.pending)
        return super().pin_lora(adapter_id)

    def update_lora(self, *args: Any, **options: Any) -> int:
        self._answer(self.pending)  # it may preempt requests, and a stand-in is no token to compute again
        return super().update_lora(*args, **options)

    # ---- a step -----------------------------------------------------------------------------------------------

    def _step(self, outputs: list[RequestOutput]) -> None:
        before = self.unread
        super()._step(outputs)
        if before is not None and self.unread is before:
            self._answer(outputs)  # nothing was launched after it

    def _launch(self, scheduled: SchedulerOutput) -> PendingStep:
        if self.unread is not None and not self.tokens.takes_stand_ins(scheduled):
            self.unread.read()
        return super()._launch(scheduled)

    def _sample(self, launched: PendingStep, outputs: list[RequestOutput]) -> Sampled:
        """Answer the step before. Then stand-ins for the step launched now, unless it must be sampled at once."""
        self._answer(outputs)
        wait = self.tokens.leave(launched)
        if wait is None:
            return super()._sample(launched, outputs)
        self._end_pass()
        ids = [request.request_id for request in launched.requests]
        self.unread = UnreadStep(frozenset(ids), wait)
        return {request_id: (-1 - row, UNREAD) for row, request_id in enumerate(ids)}

    def _finish(
        self, request: Request, outputs: list[RequestOutput], logprobs: dict[int, Logprob] | None = None
    ) -> None:
        if logprobs is UNREAD:
            self.unread.answered.append(request)
            return
        if self.unread is not None and request.request_id in self.unread.request_ids:
            self._answer(outputs)
        super()._finish(request, outputs, logprobs)

    def _fail(self, request_ids: list[str], error: BaseException, outputs: list[RequestOutput]) -> None:
        self._answer(outputs)  # no token is lost
        super()._fail(request_ids, error, outputs)

    def _answer(self, outputs: list[RequestOutput]) -> None:
        """Wait for the tokens of the step before, and make the outputs of its requests."""
        step = self.unread
        if step is None:
            return
        sampled = step.read()
        self.unread = None
        for request in step.answered:
            # Who ended in the meantime has had an output, or wants none.
            if request.status not in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
                check_stop(request, self.scheduler.max_model_len)
                super()._finish(request, outputs, sampled[request.request_id][1])
