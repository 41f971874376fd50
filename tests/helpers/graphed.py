"""Steps that are "captured" on any device: a captured step just runs again, through the kernels that a GPU has."""

from collections.abc import Callable

from minivllm.gpu.fused import FusedLlamaModel, fuse
from minivllm.gpu.paged_attention import build_paged_attention
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
) -> StepGraphs:
    """Give a runner captured steps, and attention that reads pages; None for `wrapper` makes CUDA graphs."""
    runner.build_attention = build_paged_attention(runner.config)
    if not isinstance(runner.model.model, FusedLlamaModel):  # no option of a CPU's engine asked for kernels
        fuse(runner.model)
    runner.graphs = StepGraphs(runner, decodes, mixed, wrapper)
    return runner.graphs
