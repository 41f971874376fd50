"""What an engine on a GPU, or one whose options ask for kernels, has in the places of the core's parts."""

from typing import Any

import torch

from minivllm.config import KERNEL_BACKENDS, PAGED_BACKENDS, EngineConfig
from minivllm.core.scheduler import Scheduler
from minivllm.parts import Parts
from minivllm.worker.kv_memory import KVMemory
from minivllm.worker.model_runner import ModelRunner

# Below, imports are late: Triton is not everywhere, and an engine on a CPU needs none of it.


def add_to(parts: Parts) -> None:
    """Memory that is measured, attention that reads pages, graphs, kernels, and slots in pages."""
    config, lora_config = parts.config, parts.config.lora_config
    on_gpu = torch.device(config.device).type != "cpu"
    if on_gpu:
        parts.runner |= _gpu_parts(config)
    if lora_config is not None:
        if on_gpu:
            parts.manager["make_slot_writer"] = parts.lora.make_slot_writer
        if lora_config.backend_on(config.device) in PAGED_BACKENDS:
            from minivllm.gpu.pages.kv_and_pages import KVAndPagesMemory
            from minivllm.gpu.pages.manager import ElasticModelManager

            parts.manager_class, parts.make_scheduler = ElasticModelManager, make_scheduler
            parts.runner["memory"] = KVAndPagesMemory(parts.runner.get("memory", KVMemory()))
    if config.model_config.batch_invariant:
        from minivllm.gpu.kernels.invariant_linear import invariant_linear
        from minivllm.gpu.paged_attention import build_paged_attention

        parts.runner["build_attention"] = build_paged_attention(config)
        parts.runner["linear_product"] = invariant_linear
    if runs_kernels(config):
        from minivllm.gpu.fused import fuse

        parts.runner["prepare_model"] = fuse


def runs_kernels(config: EngineConfig) -> bool:
    """Whether steps run on Triton's kernels: on a GPU, or where options ask for them, through Triton's interpreter."""
    if torch.device(config.device).type != "cpu" or config.model_config.batch_invariant:
        return True
    return config.lora_config is not None and config.lora_config.backend_on(config.device) in KERNEL_BACKENDS


def _gpu_parts(config: EngineConfig) -> dict[str, object]:
    """What a runner on a GPU has in the place of the plain parts: `memory`, and for 16 bits paged attention, `capture`.

    Steps in float32, which nobody serves, have PyTorch's attention and run eagerly.
    """
    from minivllm.gpu.measured_memory import MeasuredMemory

    is_paged = config.model_config.dtype in (torch.float16, torch.bfloat16)
    captures = is_paged and not config.model_config.enforce_eager
    parts: dict[str, object] = {"memory": MeasuredMemory(captures)}
    if is_paged:
        from minivllm.gpu.paged_attention import build_paged_attention

        parts["build_attention"] = build_paged_attention(config)
    if captures:
        from minivllm.gpu.step_graphs import StepGraphs

        parts["capture"] = StepGraphs
    return parts


def make_scheduler(runner: ModelRunner, *arguments: Any, **options: Any) -> Scheduler:
    """`make_scheduler` of `Parts`, for adapters in pages."""
    from minivllm.gpu.pages.scheduler import scheduler_for_pages

    blocks_a_page = getattr(runner.memory_plan, "blocks_a_page", 0)
    return scheduler_for_pages(runner.worker_manager.manager, blocks_a_page, *arguments, **options)
