"""Steps that are "captured" on any device: a captured step just runs again, through the kernels that a GPU has."""

from collections.abc import Callable

from minivllm.gpu.decode_buffers import DecodeBuffers
from minivllm.gpu.fused import FusedLlamaModel, fuse
from minivllm.gpu.install import paged_attention
from minivllm.gpu.step_graphs import StepGraphs
from minivllm.worker.model_runner import ModelRunner


def rerun(step: Callable) -> Callable:
    step()
    return step


def graph_steps(
    runner: ModelRunner,
    *,
    decodes: bool = True,
    mixed: bool = True,
    wrapper: Callable[[Callable], Callable] | None = rerun,
    decode_buffers: type[DecodeBuffers] = DecodeBuffers,
    paged: bool = True,
) -> StepGraphs:
    """Give a runner captured steps; None for `wrapper` makes CUDA graphs.   paged: with attention that reads pages"""
    if paged:
        runner.build_attention = paged_attention(runner.config)
    if not isinstance(runner.model.model, FusedLlamaModel):  # no option of a CPU's engine asked for kernels
        fuse(runner.model)
    runner.graphs = graphs = StepGraphs(runner, decode_buffers, wrapper)
    if mixed:
        graphs.capture_mixed()
    if decodes:
        graphs.capture_decodes()
    return graphs
