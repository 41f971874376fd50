"""Tokens that are read after the next step was launched. See vllm/v1/worker/gpu_model_runner.py (v0.22.1)."""

from collections.abc import Callable
from itertools import repeat

import torch

from minivllm.core.output import SchedulerOutput
from minivllm.layers.to_device import to_host
from minivllm.worker.model_runner import Executor
from minivllm.worker.row_sampler import PendingStep, Sampled, all_take_likeliest


class TokensAhead:
    """Leaves a step's tokens on the device for the next one.

    Until the host knows a token, a stand-in takes its place in the request: -1 - i for the token of row i of the step
    launched last. A captured step looks these up on the device.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def takes_stand_ins(self, output: SchedulerOutput) -> bool:
        """Whether the step will run as a graph."""
        return self.executor.runner.graphs.find(output) is not None

    @torch.inference_mode()
    def leave(self, step: PendingStep) -> Callable[[], Sampled] | None:
        """Start the way of a step's tokens to the host, and give a call that waits for them, as `sample_tokens` does.

        None if they are still to be sampled. To be called when all tokens before them are known, before another step
        is launched.
        """
        wait = self._leave(step)
        self.executor.share_tokens()
        return wait

    def _leave(self, step: PendingStep) -> Callable[[], Sampled] | None:
        requests, runner = step.requests, self.executor.runner
        if not requests:
            return None
        chosen, sampled = step.tokens, None
        if chosen is None or not all_take_likeliest(requests):
            try:
                sampled = runner.row_sampler.launch(requests, step.logits[: len(requests)])
            except Exception:  # raised again where it is found whose row it is: `RowSampler.sample_step`
                return None
            chosen = sampled.token_ids
            runner.graphs.output.tokens[: len(requests)].copy_(chosen)
        tokens_there = to_host(chosen[: len(requests)])

        def wait() -> Sampled:
            (tokens,) = tokens_there()
            if self.executor.error is not None:
                raise self.executor.error
            logprobs = sampled.logprobs if sampled else repeat(None)
            rows = zip(requests, tokens.tolist(), logprobs)
            return {request.request_id: (token, found) for request, token, found in rows}

        return wait
