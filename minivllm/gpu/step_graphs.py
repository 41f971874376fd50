"""Steps as CUDA graphs, of decodes and of prompts. Stands for `capture_model` of vllm/v1/worker/gpu_model_runner.py and
vllm/v1/cudagraph_dispatcher.py (v0.22.1).

vLLM captures what is between the attentions of a step with prompts, piece by piece. Here one kernel attends for prompts
and decodes alike, and reads from the device who they are. So a graph is a whole step, for every mixture of so many
tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import attrgetter

import numpy as np
import torch

from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.gpu.cuda_graphs import (
    CapturedOutput,
    CapturedStep,
    CUDAGraphWrapper,
    StepOutput,
    capture_sizes,
    mixed_sizes,
    no_garbage_collection,
    smallest_that_holds,
)
from minivllm.gpu.paged_attention import queries_per_tile
from minivllm.gpu.step_buffers import StepBuffers, StepShape
from minivllm.progress import followed
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.model_runner import Graphs, ModelRunner
from minivllm.worker.row_sampler import PendingStep

# The row that fills a graph: it has no adapter, so it is a base row in both of a backend's mappings.
PADDING = Request("padding", [0], SamplingParams())
# What adapters a step has. Without any, a graph has no trace of LoRA, also where LoRA is on. Few adapters have weights
# on embedding and head: steps of decodes are captured with these, and without.
NO_ADAPTERS, ON_LAYERS, ON_ENDS = 0, 1, 2


@dataclass(frozen=True)
class FoundGraph:
    """The captured steps of one shape (`Graph`)."""

    graphs: "StepGraphs"
    shape: StepShape

    def padded(self, batch: InputBatch) -> InputBatch:
        tokens, samples = batch.num_scheduled_tokens, batch.num_sampled_tokens
        return InputBatch(
            [*batch.requests, PADDING],
            np.append(tokens, self.shape.tokens - tokens.sum()),
            np.append(samples, self.shape.rows - samples.sum()),
        )

    def run(self, batch: InputBatch) -> PendingStep:
        return self.graphs.run(batch, self.shape)


class StepGraphs(Graphs):
    """A runner's captured steps. vLLM: `CudagraphDispatcher`.

    decodes   shapes of steps in which every request computes one token, ascending
    mixed     shapes of steps that hold prompts, ascending
    steps     by shape, and by what adapters the step has
    buffers   what every step reads
    output    what it writes
    """

    def __init__(
        self,
        runner: ModelRunner,
        decodes: bool = True,
        mixed: bool = True,
        wrapper: Callable[[CapturedStep], CapturedStep] | None = None,
    ) -> None:
        """Capture steps of most tokens first, in whose memory the others run.

        decodes, mixed   whether these are captured
        wrapper          makes a captured step of one that launches kernels; None = a CUDA graph
        """
        self.runner = runner
        self.wrapper = wrapper or partial(CUDAGraphWrapper, pool=torch.cuda.graph_pool_handle())
        config, max_rows = runner.config, runner.max_sampled_rows
        tile_tokens = queries_per_tile(config, captured=True)
        of_decodes = tile_tokens if config.model_config.batch_invariant else 1
        sizes = capture_sizes(max_rows) if decodes else []
        self.decodes = [StepShape(size, size, of_decodes) for size in sizes]
        sizes = mixed_sizes(config.scheduler_config.max_num_batched_tokens) if mixed else []
        self.mixed = [StepShape(size, min(size, max_rows), tile_tokens) for size in sizes]
        self.steps: dict[tuple[StepShape, int], CapturedStep] = {}
        self.output = StepOutput(max_rows, runner.device)
        self.buffers = StepBuffers(
            [*self.decodes, *self.mixed],
            runner.max_blocks_per_request,
            config.cache_config.block_size,
            runner.device,
        )
        with (
            torch.inference_mode(),
            no_garbage_collection(),
            runner.maybe_setup_dummy_loras(config.lora_config),
        ):
            for shape in followed(self.mixed[::-1], "Capturing steps with prompts"):
                self._capture(shape, (ON_ENDS, NO_ADAPTERS))
            for shape in followed(self.decodes[::-1], "Capturing decode steps"):
                self._capture(shape, (ON_LAYERS, ON_ENDS, NO_ADAPTERS))

    @property
    def hold_most_steps(self) -> bool:
        return bool(self.decodes and self.mixed)

    @property
    def most_tokens(self) -> int | None:
        return self.mixed[-1].tokens if self.mixed else None

    @property
    def captured(self) -> list[dict]:
        return [self.steps]

    def find(self, output: SchedulerOutput) -> FoundGraph | None:
        """None for a step that is larger than any captured one, or wants more logits than those it samples from."""
        shapes = self.decodes
        if not output.only_decodes:
            shapes = self.mixed
            asked = [
                e.request for e in output.scheduled if e.request.sampling_params.prompt_logprobs is not None
            ]
            if any(request.wants_prompt_logprobs for request in asked):
                return None
        shape = smallest_that_holds(shapes, output.total_num_scheduled_tokens, attrgetter("tokens"))
        return shape and FoundGraph(self, shape)

    def adapters_of_batch(self) -> int:
        """Of the step that the backend has begun: NO_ADAPTERS, ON_LAYERS or ON_ENDS."""
        manager = self.runner.worker_manager
        backend = manager and manager.manager.punica_wrapper
        if backend is None or backend.no_lora:
            return NO_ADAPTERS
        return ON_ENDS if backend.reaches_ends else ON_LAYERS

    def run(self, batch: InputBatch, shape: StepShape) -> PendingStep:
        """Launch a batch's step in the graph of this shape."""
        is_row = batch.num_scheduled_tokens > 0
        counts, samples = batch.num_scheduled_tokens[is_row], batch.num_sampled_tokens[is_row] > 0
        rows = list(compress(batch.requests, is_row.tolist()))
        starts = [request.num_computed_tokens for request in rows]
        token_ids = [
            token
            for request, start, tokens in zip(rows, starts, counts.tolist())
            for token in request.all_token_ids[start : start + tokens]
        ]
        last_rows = (np.cumsum(counts) - 1)[samples]
        tables = [request.block_ids for request in rows]
        self.buffers.fill(token_ids, counts, np.array(starts), tables, last_rows, shape)
        sampling = list(compress(rows, samples.tolist()))
        output = self.replay(shape)
        return PendingStep(sampling, *output) if sampling else PendingStep([], None)

    def replay(self, shape: StepShape) -> CapturedOutput:
        """Launch the captured step on what is in the buffers."""
        adapters = self.adapters_of_batch()
        if adapters == ON_LAYERS and (shape, ON_LAYERS) not in self.steps:
            adapters = ON_ENDS
        return self.steps[shape, adapters]()

    def _capture(self, shape: StepShape, kinds: tuple[int, ...]) -> None:
        """Capture a shape with each of these kinds of adapters that there is."""
        config = self.runner.config
        attn = self.buffers.attention(shape, config.model_config.max_model_len)
        fields, model = self.buffers.fields(shape), self.runner.model

        def step() -> CapturedOutput:
            hidden_states = model(self.output.fill_in(fields.input_ids), fields.positions, attn)  # (T, H)
            return self.output.keep(model.compute_logits(hidden_states[fields.last_rows]))

        tokens = np.ones(shape.tokens, dtype=np.int64)
        samples = (np.arange(shape.tokens) < shape.rows).astype(np.int64)
        for kind in kinds if config.lora_config else (NO_ADAPTERS,):
            self.runner.select_dummy_loras(config.lora_config, tokens, samples, kind != NO_ADAPTERS)
            with self._without_ends() if kind == ON_LAYERS else nullcontext():
                adapters = self.adapters_of_batch()  # no more than ON_LAYERS where no end is wrapped
                if (shape, adapters) not in self.steps:
                    self.steps[shape, adapters] = self.wrapper(step)

    @contextmanager
    def _without_ends(self) -> Iterator[None]:
        """Inside, layers find that no adapter has weights on embedding and head."""
        backend = self.runner.worker_manager.manager.punica_wrapper
        backend.leaves_out_ends = True
        try:
            yield
        finally:
            backend.leaves_out_ends = False
