"""From logits of rows to tokens of requests. Stands for the sampling in vllm/v1/worker/gpu_input_batch.py (v0.22.1)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from minivllm.core.request import Request
from minivllm.errors import recoverable
from minivllm.layers.penalties import TokenHistory
from minivllm.layers.sampler import Logprob, RepeatableDraws, Sampler, SamplerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.token_masks import TokenMasks

# What a row of a request that has ended is sampled by.
ENDED = SamplingParams(temperature=0)

Sampled = dict[str, tuple[int, dict[int, Logprob] | None]]


@dataclass(frozen=True)
class PendingStep:
    """A step that was launched; its tokens are not read yet.

    requests   the P rows that sample
    logits     (P or more, V), the rows' own first; None when no row samples
    tokens     (P or more,) int64, the likeliest of each row if the step has found it already
    errors     request id -> what its own row's sampling raised; filled in by `sample_tokens`
    """

    requests: list[Request]
    logits: torch.Tensor | None
    tokens: torch.Tensor | None = None
    errors: dict[str, BaseException] = field(default_factory=dict)


class RowSampler:
    """The sampler, and each request's own random generator.

    draws   request id -> its random generator, kept until `forget`
    masks   of answers with a given structure, likewise; they need the base model's tokenizer
    """

    def __init__(self, sampler: Sampler, tokenizer: Any = None) -> None:
        self.sampler = sampler
        self.draws: dict[str, RepeatableDraws] = {}
        self.masks = TokenMasks(sampler.eos_token_ids, tokenizer)

    def sample_step(self, step: PendingStep) -> Sampled:
        """As `sample`, of a step's rows. Those that cannot be sampled are left out; `step.errors` has them."""
        if step.tokens is not None and all_take_likeliest(step.requests):
            tokens = step.tokens[: len(step.requests)].tolist()
            return {request.request_id: (token, None) for request, token in zip(step.requests, tokens)}
        logits = step.logits[: len(step.requests)]
        try:
            return self.sample(step.requests, logits)
        except BaseException as error:
            sampled, errors = self.sample_apart(step.requests, logits, recoverable(error))
            step.errors.update(errors)
            return sampled

    def sample(self, requests: Sequence[Request], logits: torch.Tensor) -> Sampled:
        """Request id -> (token, its logprobs if requested).   logits: (P, V), a row each request"""
        sampled = self.launch(requests, logits)
        tokens = zip(requests, sampled.token_ids.tolist(), sampled.logprobs)
        return {request.request_id: (token, logprobs) for request, token, logprobs in tokens}

    def launch(self, requests: Sequence[Request], logits: torch.Tensor) -> SamplerOutput:
        """As `sample`, but on a GPU the host waits for nothing yet.

        A request that has finished gets the likeliest token, which is not used.
        """
        rows = [ENDED if request.is_finished else request.sampling_params for request in requests]
        positions = [request.num_output_tokens for request in requests]
        draws = [
            None if params is ENDED else self._draws_of(request).at(position)
            for request, params, position in zip(requests, rows, positions)
        ]
        histories = [TokenHistory(request.prompt_token_ids, request.output_token_ids) for request in requests]
        masks = self.masks.of(requests, logits.shape[1])
        return self.sampler(logits, rows, draws, positions, histories, masks)

    def _draws_of(self, request: Request) -> RepeatableDraws:
        if request.request_id not in self.draws:
            self.draws[request.request_id] = RepeatableDraws(request.sampling_params)
        return self.draws[request.request_id]

    def sample_apart(
        self, requests: Sequence[Request], logits: torch.Tensor, error: BaseException
    ) -> tuple[Sampled, dict[str, BaseException]]:
        """As `sample`, but row by row; also request id -> the error of its own row, for rows that cannot be sampled.

        error   the error of all rows together. If no row can be sampled, no request caused it, and it is raised again
        """
        sampled: Sampled = {}
        errors: dict[str, BaseException] = {}
        for row, request in enumerate(requests):
            try:
                sampled |= self.sample([request], logits[row : row + 1])
            except BaseException as own:
                errors[request.request_id] = recoverable(own)
        if not sampled:
            raise error
        return sampled, errors

    def forget(self, request_id: str) -> None:
        """Drop the state of a finished request."""
        self.draws.pop(request_id, None)
        self.masks.forget(request_id)


def all_take_likeliest(requests: Sequence[Request]) -> bool:
    """Whether the argmax of the logits is all that these requests want of them."""
    for request in requests:
        params = request.sampling_params
        if not params.takes_likeliest or (
            params.min_tokens > 0 and request.num_output_tokens < params.min_tokens
        ):
            return False
    return True
