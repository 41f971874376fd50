"""Steps that mix prompts and decodes as CUDA graphs. Stands for vllm/v1/cudagraph_dispatcher.py (v0.22.1).

vLLM captures what is between the attentions, piece by piece. Here one kernel attends for prompts and decodes alike,
and reads from the device who they are. So a graph is a whole step, for every mixture of so many tokens.
"""

from collections.abc import Callable

import numpy as np
from torch import nn

from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.gpu.cuda_graphs import DecodeOutput, DecodeStep, StepOutput, smallest_that_holds
from minivllm.gpu.mixed_buffers import MixedBuffers
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.row_sampler import PendingStep

# Of a captured step. More sizes would take longer to capture, and a larger one more memory; larger steps are rare.
# Not that they gain nothing: up to some 2,000 tokens a GPU waits for their launches (docs/simulate.md).
MOST_TOKENS = 1024


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Tokens that graphs are captured for, ascending: no step is padded by more than a third, or by 32.

    None of 448 nor of 896 tokens: on an H100 products of 448 rows took a Llama-8B's step 4 ms longer than those of 512
    do (15.7 ms, not 11.6), and 896 no less than 1,024 (21.5 ms, 21.7).
    """
    most = min(MOST_TOKENS, max_num_batched_tokens)
    sizes = {*range(32, 256, 32), 256, 320, 384, 512, 640, 768, most}
    return sorted(size for size in sizes if size <= most)


class MixedGraphs:
    """A captured step for each number of tokens, with adapters and without.

    buffers, output   what every step reads, and what it writes
    wrapper           makes a captured step out of one that launches kernels
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: MixedBuffers,
        output: StepOutput,
        wrapper: Callable[[DecodeStep], DecodeStep],
    ) -> None:
        self.model, self.buffers, self.output, self.wrapper = model, buffers, output, wrapper
        self.sizes = mixed_sizes(buffers.max_tokens)
        self.steps: dict[tuple[int, bool], DecodeStep] = {}

    def capture(self, size: int, with_lora: bool) -> None:
        """Capture one size; the backend's metadata must be that of a padded batch with (or without) adapters.

        Take the largest first: the smaller ones find their memory in the pool.
        """
        fields, attn = self.buffers.fields(size), self.buffers.attention(size)

        def step() -> DecodeOutput:
            input_ids = self.output.fill_in(fields.input_ids)
            hidden_states = self.model(input_ids, fields.positions, attn)  # (T, H)
            return self.output.keep(self.model.compute_logits(hidden_states[fields.last_rows]))

        self.steps[size, with_lora] = self.wrapper(step)

    def size_for(self, output: SchedulerOutput) -> int:
        """Tokens of the graph that can run a step; 0 for one without prompts, one too large, or one of many logits."""
        if output.only_decodes:
            return 0
        requests = [entry.request for entry in output.scheduled]
        asked = [r for r in requests if r.sampling_params.prompt_logprobs is not None]
        if any(request.wants_prompt_logprobs for request in asked):
            return 0
        return smallest_that_holds(self.sizes, output.total_num_scheduled_tokens) or 0

    def rows_of(self, size: int) -> int:
        """P, the rows that a graph of so many tokens samples from."""
        return self.buffers.rows_of(size)

    def run(self, batch: InputBatch, size: int, with_lora: int) -> PendingStep:
        """Launch a step in the graph of so many tokens."""
        token_ids: list[int] = []
        last_rows: list[int] = []
        rows: list[Request] = []
        sampling: list[Request] = []
        counts = batch.num_scheduled_tokens
        for request, tokens, samples in zip(
            batch.requests, counts.tolist(), batch.num_sampled_tokens.tolist()
        ):
            if not tokens:
                continue
            start = request.num_computed_tokens
            token_ids += request.all_token_ids[start : start + tokens]
            rows.append(request)
            if samples:
                sampling.append(request)
                last_rows.append(len(token_ids) - 1)
        starts = np.array([request.num_computed_tokens for request in rows])
        tables = [request.block_ids for request in rows]
        self.buffers.fill(token_ids, counts[counts > 0], starts, tables, last_rows, size)
        output = self.replay(size, with_lora > 0)
        return PendingStep(sampling, *output) if sampling else PendingStep([], None)

    def replay(self, size: int, with_lora: bool) -> DecodeOutput:
        """Launch the captured step on what is in the buffers."""
        return self.steps[size, with_lora]()
