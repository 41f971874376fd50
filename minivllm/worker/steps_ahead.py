"""Tokens that are read after the next step was launched. See vllm/v1/worker/gpu_model_runner.py (v0.22.1)."""

from collections.abc import Callable

import torch

from minivllm.core.output import SchedulerOutput
from minivllm.worker.cuda_graphs import DecodeGraphs, StepOutput
from minivllm.worker.mixed_graphs import GraphedSteps
from minivllm.worker.row_sampler import PendingStep, takes_likeliest


class StepsAhead(GraphedSteps):
    """What a runner with graphs can do for an engine that runs ahead (`RunAhead`).

    Until the host knows a token, a stand-in takes its place in the request: -1 - i for the token of row i of the step
    launched last. A captured step looks these up on the device.
    """

    decode_graphs: DecodeGraphs | None
    step_output: StepOutput

    @property
    def can_run_ahead(self) -> bool:
        return self.decode_graphs is not None and self.mixed_graphs is not None

    def takes_stand_ins(self, output: SchedulerOutput) -> bool:
        """Whether the step will run as a graph."""
        if self.mixed_graphs is not None and self.mixed_graphs.size_for(output):
            return True
        tokens = output.total_num_scheduled_tokens
        only_decodes = tokens == len(output.scheduled) and all(entry.samples for entry in output.scheduled)
        return only_decodes and self.decode_graphs.padded_size(tokens) is not None

    @torch.inference_mode()
    def leave_tokens(self, step: PendingStep) -> Callable[[], list[int]] | None:
        """Start the way of a step's tokens to the host, and give a call that waits for them.

        None if they are still to be sampled. To be called before another step is launched, and waited for before it is
        called again.
        """
        if step.tokens is None or not all(map(takes_likeliest, step.requests)):
            return None
        host = self.step_output.host_tokens[: len(step.requests)]
        host.copy_(step.tokens[: len(step.requests)], non_blocking=True)
        if not step.tokens.is_cuda:
            return host.tolist
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[int]:
            arrived.synchronize()
            return host.tolist()

        return wait
