"""A step as a CUDA graph, what it leaves behind, and of which sizes there are some.

Stands for vllm/compilation/cuda_graph.py, and cudagraph_capture_sizes of vllm/config/compilation.py (v0.22.1).
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")

# Of a captured step with prompts. More sizes would take longer to capture, and a larger one more memory; larger steps
# are rare. Not that they gain nothing: up to some 2,000 tokens a GPU waits for their launches (docs/simulate.md).
MOST_TOKENS = 1024


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Rows that decodes are captured for, ascending: close together where padding would cost most."""
    sizes = {1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_num_seqs, 32), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Tokens that steps with prompts are captured for, ascending: none is padded by more than a third, or by 32.

    None of 448 nor of 896 tokens: on an H100 products of 448 rows took a Llama-8B's step 4 ms longer than those of 512
    do (15.7 ms, not 11.6), and 896 no less than 1,024 (21.5 ms, 21.7).
    """
    most = min(MOST_TOKENS, max_num_batched_tokens)
    sizes = {*range(32, 256, 32), 256, 320, 384, 512, 640, 768, most}
    return sorted(size for size in sizes if size <= most)


def smallest_that_holds(
    sizes: Sequence[T], number: int, size_of: Callable[[T], int] | None = None
) -> T | None:
    """Of ascending sizes, or of things of ascending sizes; None if none does."""
    place = bisect_left(sizes, number, key=size_of)
    return sizes[place] if place < len(sizes) else None


class CapturedOutput(NamedTuple):
    """What a captured step leaves behind of the P rows that sample; overwritten by the next step.

    logits   (P, V)
    tokens   (P,) int64, the likeliest of each row
    """

    logits: torch.Tensor
    tokens: torch.Tensor


CapturedStep = Callable[[], CapturedOutput]


class CUDAGraphWrapper:
    """One step, captured; a call replays it. vLLM: `CUDAGraphWrapper`.

    step   launches kernels on fixed addresses and never waits for the GPU. It runs once before the capture, so that
           kernels are compiled and libraries have their workspaces
    pool   memory that all graphs share: only one of them runs at a time
    """

    def __init__(self, step: CapturedStep, pool: tuple[int, int]) -> None:
        step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.output = step()

    def __call__(self) -> CapturedOutput:
        self.graph.replay()
        return self.output


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

    def keep(self, logits: torch.Tensor) -> CapturedOutput:
        """Part of a step that is captured.   logits: (P, V)"""
        from minivllm.gpu.kernels.likeliest import keep_likeliest  # Triton is not everywhere

        rows, width = logits.shape
        if width not in self._logits:
            self._logits[width] = logits.new_empty(len(self.tokens), width)
        output = CapturedOutput(self._logits[width][:rows], self.tokens[:rows])
        keep_likeliest(logits, *output)
        return output
