"""From tokens to what a caller sees. Stands for vllm/v1/engine/output_processor.py (v0.22.1)."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.request import Request
from minivllm.engine.metrics import RequestMetrics
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.errors import one_sentence
from minivllm.layers.sampler import Logprob
from minivllm.text.answer import Answer
from minivllm.text.detokenizer import fast_backend


@dataclass
class RequestState:
    """What the engine keeps of a request beside the scheduler's part. vLLM: `RequestState`.

    answer        its text; None without a tokenizer
    num_emitted   tokens in its last output that was `delivered`
    """

    request: Request
    prompt: str | None
    answer: Answer | None
    metrics: RequestMetrics
    num_emitted: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class OutputProcessor:
    """Keeps what is known of each request, and builds the outputs. vLLM: `OutputProcessor`.

    ValueError for a tokenizer that is no fast one.
    """

    def __init__(self, tokenizer: Any, clock: Callable[[], float] = time.monotonic) -> None:
        if tokenizer is not None:
            fast_backend(tokenizer)  # better now than at the first request
        self.tokenizer = tokenizer
        self.clock = clock
        self.states: dict[str, RequestState] = {}

    def new_state(self, request: Request, prompt: str | None, tokenizer: Any = None) -> RequestState:
        """What is kept of a request in `states`.   tokenizer: its adapter's own; None = the model's"""
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        answer = None if tokenizer is None else Answer(request, tokenizer)
        return RequestState(request, prompt, answer, RequestMetrics(request.arrival_time))

    def mark_scheduled(self, request_id: str) -> None:
        """The request is admitted, for the first time or after a preemption."""
        state = self.states[request_id]
        state.metrics.observe_admission(state.request, self.clock())

    def process(self, request: Request, logprobs: dict[int, Logprob] | None = None) -> RequestOutput:
        """What is new of a request since the last output that was `delivered`; to be called once a step.

        Its text may end it (`Answer.update`). The caller must then take it out of the scheduler.
        """
        state = self.states[request.request_id]
        new_token_ids = request.output_token_ids[state.num_emitted :]
        if logprobs is not None:
            state.logprobs.append(logprobs)
            state.cumulative_logprob += logprobs[new_token_ids[-1]].logprob
        delta_text = ""
        if state.answer is not None:
            asked = [logprobs, *(() if state.num_emitted else request.prompt_logprobs)]
            delta_text = state.answer.update(new_token_ids, list(filter(None, asked)))
        if not state.num_emitted or request.status.is_finished:
            state.metrics.observe(request, self.clock())
        return self._output(state, delta_text, new_token_ids)

    def delivered(self, output: RequestOutput) -> None:
        """An output is on its way to the caller; forgets its request if it is the last."""
        if output.finished:
            self.states.pop(output.request_id, None)
        elif (state := self.states.get(output.request_id)) is not None:
            state.num_emitted = len(output.outputs[0].token_ids)

    def drop(self, request_id: str) -> None:
        """Forget a request that nobody wants to hear of any more."""
        self.states.pop(request_id, None)

    def _output(self, state: RequestState, delta_text: str, delta_token_ids: list[int]) -> RequestOutput:
        request = state.request
        cumulative_logprob = logprobs = None
        if request.sampling_params.logprobs is not None:
            cumulative_logprob, logprobs = state.cumulative_logprob, list(state.logprobs)
        # By position, in the order of their fields: names would double the time, and there are thousands a second.
        completion = CompletionOutput(
            0,
            "" if state.answer is None else state.answer.detokenizer.text,
            list(request.output_token_ids),
            cumulative_logprob,
            logprobs,
            request.status.finish_reason,
            request.stop_reason,
            delta_text,
            delta_token_ids,
        )
        return RequestOutput(
            request.request_id,
            state.prompt,
            request.prompt_token_ids,
            [completion],
            request.status.is_finished,
            request.lora_request,
            request.num_cached_tokens,
            request.prompt_logprobs or None,
            None if request.error is None else one_sentence(request.error),
            state.metrics,
        )
