"""Tokens that are read after the next step was launched. See vllm/v1/worker/gpu_model_runner.py (v0.22.1)."""

from collections.abc import Callable
from itertools import repeat

import torch

from minivllm.core.output import SchedulerOutput
from minivllm.layers.to_device import to_host
from minivllm.worker.cuda_graphs import DecodeGraphs, StepOutput
from minivllm.worker.mixed_graphs import GraphedSteps
from minivllm.worker.row_sampler import PendingStep, RowSampler, Sampled, all_take_likeliest


class StepsAhead(GraphedSteps):
    """What a runner with graphs can do for an engine that runs ahead (`RunAhead`).

    Until the host knows a token, a stand-in takes its place in the request: -1 - i for the token of row i of the step
    launched last. A captured step looks these up on the device.
    """

    decode_graphs: DecodeGraphs | None
    step_output: StepOutput
    row_sampler: RowSampler

    @property
    def can_run_ahead(self) -> bool:
        return self.decode_graphs is not None and self.mixed_graphs is not None

    def takes_stand_ins(self, output: SchedulerOutput) -> bool:
        """Whether the step will run as a graph."""
        if self.mixed_graphs is not None and self.mixed_graphs.size_for(output):
            return True
        size = self.decode_graphs.padded_size(output.total_num_scheduled_tokens)
        return output.only_decodes and size is not None

    @torch.inference_mode()
    def leave_tokens(self, step: PendingStep) -> Callable[[], Sampled] | None:
        """Start the way of a step's tokens to the host, and give a call that waits for them, as `sample_tokens` does.

        None if they are still to be sampled. To be called when all tokens before them are known, before another step
        is launched.
        """
        requests = step.requests
        if not requests:
            return None
        chosen, sampled = step.tokens, None
        if chosen is None or not all_take_likeliest(requests):
            try:
                sampled = self.row_sampler.launch(requests, step.logits[: len(requests)])
            except Exception:  # raised again where it is found whose row it is: `RowSampler.sample_step`
                return None
            chosen = sampled.token_ids
            self.step_output.tokens[: len(requests)].copy_(chosen)
        tokens_there = to_host(chosen[: len(requests)])

        def wait() -> Sampled:
            (tokens,) = tokens_there()
            logprobs = sampled.logprobs if sampled else repeat(None)
            rows = zip(requests, tokens.tolist(), logprobs)
            return {request.request_id: (token, found) for request, token, found in rows}

        return wait
