"""All captured steps of a runner: decodes, and steps that hold prompts. Stands for `capture_model` of
vllm/v1/worker/gpu_model_runner.py and vllm/v1/cudagraph_dispatcher.py (v0.22.1).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request
from minivllm.gpu.cuda_graphs import (
    CUDAGraphWrapper,
    DecodeGraphs,
    DecodeStep,
    StepOutput,
    no_garbage_collection,
)
from minivllm.gpu.decode_buffers import DecodeBuffers
from minivllm.gpu.mixed_buffers import MixedBuffers
from minivllm.gpu.mixed_graphs import MixedGraphs, mixed_sizes
from minivllm.progress import followed
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.model_runner import Graphs, ModelRunner
from minivllm.worker.row_sampler import PendingStep

# The row that fills a graph: it has no adapter, so it is a base row in both of a backend's mappings.
PADDING = Request("padding", [0], SamplingParams())


@dataclass(frozen=True)
class FoundGraph:
    """One of the captured steps (`Graph`).

    size   its tokens
    """

    graphs: DecodeGraphs | MixedGraphs
    size: int
    adapters_of_batch: Callable[[], int]

    def padded(self, batch: InputBatch) -> InputBatch:
        tokens, samples = batch.num_scheduled_tokens, batch.num_sampled_tokens
        return InputBatch(
            [*batch.requests, PADDING],
            np.append(tokens, self.size - tokens.sum()),
            np.append(samples, self.graphs.rows_of(self.size) - samples.sum()),
        )

    def run(self, batch: InputBatch) -> PendingStep:
        return self.graphs.run(batch, self.size, self.adapters_of_batch())


class StepGraphs(Graphs):
    """Steps of a runner as CUDA graphs, once they are captured.

    output    what all captured steps write
    decodes   steps in which every request computes one token; None = not captured
    mixed     steps that hold prompts, likewise
    """

    def __init__(
        self,
        runner: ModelRunner,
        decode_buffers: type[DecodeBuffers] = DecodeBuffers,
        wrapper: Callable[[DecodeStep], DecodeStep] | None = None,
    ) -> None:
        """wrapper   makes a captured step of one that launches kernels; None = a CUDA graph"""
        self.runner = runner
        self.wrapper = wrapper or partial(CUDAGraphWrapper, pool=torch.cuda.graph_pool_handle())
        self.decode_buffers = decode_buffers
        self.output = StepOutput(runner.max_sampled_rows, runner.device)
        self.decodes: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None

    @classmethod
    def of_all_steps(
        cls, runner: ModelRunner, decode_buffers: type[DecodeBuffers] = DecodeBuffers
    ) -> "StepGraphs":
        """Capture steps of most tokens first, in whose memory the others run."""
        graphs = cls(runner, decode_buffers)
        graphs.capture_mixed()
        graphs.capture_decodes()
        return graphs

    def find(self, output: SchedulerOutput) -> FoundGraph | None:
        for graphs in (self.decodes, self.mixed):
            if graphs is not None and (size := graphs.size_for(output)):
                return FoundGraph(graphs, size, self.adapters_of_batch)
        return None

    @property
    def hold_most_steps(self) -> bool:
        return self.decodes is not None and self.mixed is not None

    @property
    def most_tokens(self) -> int | None:
        return None if self.mixed is None else self.mixed.sizes[-1]

    @property
    def captured(self) -> list[dict]:
        """What holds the graphs themselves."""
        return [graphs.steps for graphs in (self.decodes, self.mixed) if graphs is not None]

    def adapters_of_batch(self) -> int:
        """Which of the captured steps of a size a batch needs: 0 = without adapters, 1 = with, 2 = with adapters on
        embedding and head, too."""
        manager = self.runner.worker_manager
        backend = manager and manager.manager.punica_wrapper
        return 0 if backend is None or backend.no_lora else 1 + backend.reaches_ends

    @torch.inference_mode()
    def capture_decodes(self) -> None:
        """Capture decode steps of every size, without adapters and, if LoRA is on, with."""
        runner, config = self.runner, self.runner.config
        buffers = self.decode_buffers(
            runner.max_sampled_rows,
            runner.max_blocks_per_request,
            config.cache_config.block_size,
            runner.device,
        )
        max_model_len = config.model_config.max_model_len
        graphs = DecodeGraphs(runner.model, buffers, self.output, max_model_len, self.wrapper)
        with no_garbage_collection(), runner.maybe_setup_dummy_loras(config.lora_config):
            for size in followed(graphs.sizes[::-1], "Capturing decode steps"):
                rows = np.ones(size, dtype=np.int64)
                for with_lora in (1, 2, 0) if config.lora_config else (0,):
                    runner.select_dummy_loras(config.lora_config, rows, rows, with_lora > 0)
                    if with_lora > self.adapters_of_batch():
                        continue  # no layer asks: neither embedding nor head is wrapped
                    with self._without_ends() if with_lora == 1 else nullcontext():
                        graphs.capture(size, with_lora)
        self.decodes = graphs

    @torch.inference_mode()
    def capture_mixed(self) -> None:
        """Capture steps that hold prompts, for every number of tokens, as `capture_decodes` does those of decodes."""
        from minivllm.gpu.kernels.mixed_attention import queries_per_tile  # Triton is not everywhere

        runner, config = self.runner, self.runner.config
        buffers = MixedBuffers(
            mixed_sizes(config.scheduler_config.max_num_batched_tokens)[-1],
            runner.max_sampled_rows,
            runner.max_blocks_per_request,
            config.cache_config.block_size,
            queries_per_tile(runner.attention_layers[0].group_size),
            runner.device,
        )
        graphs = MixedGraphs(runner.model, buffers, self.output, self.wrapper)
        with no_garbage_collection(), runner.maybe_setup_dummy_loras(config.lora_config):
            for size in followed(graphs.sizes[::-1], "Capturing steps with prompts"):
                tokens = np.ones(size, dtype=np.int64)
                samples = (np.arange(size) < graphs.rows_of(size)).astype(np.int64)
                for with_lora in (True, False) if config.lora_config else (False,):
                    runner.select_dummy_loras(config.lora_config, tokens, samples, with_lora)
                    graphs.capture(size, with_lora)
        self.mixed = graphs

    @contextmanager
    def _without_ends(self) -> Iterator[None]:
        """Inside, layers find that no adapter has weights on embedding and head."""
        backend = self.runner.worker_manager.manager.punica_wrapper
        backend.leaves_out_ends = True
        try:
            yield
        finally:
            backend.leaves_out_ends = False
