"""Decode steps as CUDA graphs. Stands for vllm/compilation/cuda_graph.py, v1/cudagraph_dispatcher.py (v0.22.1)."""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from minivllm.core.output import SchedulerOutput
from minivllm.gpu.decode_buffers import DecodeBuffers
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.row_sampler import PendingStep


class DecodeOutput(NamedTuple):
    """What a captured step leaves behind of the P rows that sample; overwritten by the next step.

    logits   (P, V)
    tokens   (P,) int64, the likeliest of each row
    """

    logits: torch.Tensor
    tokens: torch.Tensor


DecodeStep = Callable[[], DecodeOutput]


class StepOutput:
    """Where all captured steps leave their logits: graphs of many sizes need not keep a copy each.

    max_rows   the most that sample in a step
    tokens     (max_rows,) int64, the token of each row of the step launched last: the likeliest, until another is drawn
    """

    def __init__(self, max_rows: int, device: torch.device | str) -> None:
        self.tokens = torch.zeros(max_rows, dtype=torch.long, device=device)
        # V -> (max_rows, V), made by the first step of that width, which is not captured. Steps with adapters that
        # add tokens are wider.
        self._logits: dict[int, torch.Tensor] = {}

    def fill_in(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Part of a step that is captured: ids with the tokens for which -1, -2, ... stand in.   input_ids: (T,)"""
        from minivllm.gpu.kernels.stand_ins import fill_in  # Triton is not everywhere

        return fill_in(input_ids, self.tokens)

    def keep(self, logits: torch.Tensor) -> DecodeOutput:
        """Part of a step that is captured.   logits: (P, V)"""
        from minivllm.gpu.kernels.likeliest import keep_likeliest  # Triton is not everywhere

        rows, width = logits.shape
        if width not in self._logits:
            self._logits[width] = logits.new_empty(len(self.tokens), width)
        output = DecodeOutput(self._logits[width][:rows], self.tokens[:rows])
        keep_likeliest(logits, *output)
        return output


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Rows that graphs are captured for, ascending: close together where padding would cost most."""
    sizes = {1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_num_seqs, 32), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def smallest_that_holds(sizes: list[int], number: int) -> int | None:
    """Of ascending sizes; None if none does."""
    place = bisect_left(sizes, number)
    return sizes[place] if place < len(sizes) else None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, nothing is collected: an engine of before may be garbage, and freeing its memory breaks a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CUDAGraphWrapper:
    """One step, captured; a call replays it. vLLM: `CUDAGraphWrapper`.

    step   launches kernels on fixed addresses and never waits for the GPU. It runs once before the capture, so that
           kernels are compiled and libraries have their workspaces
    pool   memory that all graphs share: only one of them runs at a time
    """

    def __init__(self, step: DecodeStep, pool: tuple[int, int]) -> None:
        step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.output = step()

    def __call__(self) -> DecodeOutput:
        self.graph.replay()
        return self.output


class DecodeGraphs:
    """A captured decode step for each size, with adapters and without. vLLM: `CudagraphDispatcher`.

    A batch without adapters runs a graph without a trace of LoRA, also where LoRA is on. `with_lora` is 2 for one that
    has adapters on embedding and head, too. Most have none there: for these steps it is 1.

    buffers   what every step reads
    output    what it writes
    wrapper   makes a captured step out of one that launches kernels
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: DecodeBuffers,
        output: StepOutput,
        max_model_len: int,
        wrapper: Callable[[DecodeStep], DecodeStep],
    ) -> None:
        self.model = model
        self.buffers, self.output = buffers, output
        self.max_model_len = max_model_len
        self.wrapper = wrapper
        self.sizes = capture_sizes(buffers.max_rows)
        self.steps: dict[tuple[int, int], DecodeStep] = {}

    def capture(self, size: int, with_lora: int) -> None:
        """Capture one size; the backend's metadata must be that of a batch with (or without) adapters.

        Take the largest first: the smaller ones find their memory in the pool.
        """
        buffers = self.buffers
        attn = buffers.attention(size, self.max_model_len)
        input_ids, positions = buffers.input_ids[:size], buffers.positions[:size]

        def step() -> DecodeOutput:
            hidden_states = self.model(self.output.fill_in(input_ids), positions, attn)  # (P, H)
            return self.output.keep(self.model.compute_logits(hidden_states))

        self.steps[size, with_lora] = self.wrapper(step)

    def padded_size(self, num_rows: int) -> int | None:
        """The smallest size that holds so many rows; None if none does."""
        return smallest_that_holds(self.sizes, num_rows)

    def size_for(self, output: SchedulerOutput) -> int:
        """Rows of the graph that can run a step; 0 if there is none: it has a prompt, or too many rows."""
        return self.padded_size(output.total_num_scheduled_tokens) or 0 if output.only_decodes else 0

    def rows_of(self, size: int) -> int:
        """P, the rows that a graph of so many tokens samples from: all."""
        return size

    def run(self, batch: InputBatch, size: int, with_lora: int) -> PendingStep:
        """Launch the step of a batch in the graph of so many rows."""
        rows = [r for r, tokens in zip(batch.requests, batch.num_scheduled_tokens.tolist()) if tokens]
        self.buffers.fill(
            [request.all_token_ids[request.num_computed_tokens] for request in rows],
            [request.num_computed_tokens for request in rows],
            [request.block_ids for request in rows],
            size,
        )
        return PendingStep(rows, *self.replay(size, with_lora))

    def replay(self, size: int, with_lora: int) -> DecodeOutput:
        """Launch the captured step on what is in the buffers."""
        return self.steps[size, with_lora]()
