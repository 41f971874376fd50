"""One wrapper for each kind of base linear.

Stands for vllm/lora/layers/column_parallel_linear.py, row_parallel_linear.py and replicated_linear.py (v0.22.1).
"""

from typing import ClassVar

from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.lora.layers.base import BaseLayerWithLoRA


class ColumnParallelLinearWithLoRA(BaseLayerWithLoRA):
    """A plain linear, or a fused one that the checkpoint stores as one matrix. vLLM: the same name."""

    wraps: ClassVar = {ColumnParallelLinear: None, MergedColumnParallelLinear: 1}


class RowParallelLinearWithLoRA(BaseLayerWithLoRA):
    """The linear back to the model's width: o_proj, down_proj. vLLM: the same name."""

    wraps: ClassVar = {RowParallelLinear: None}


class ReplicatedLinearWithLoRA(BaseLayerWithLoRA):
    """A linear that tensor parallelism would not split. vLLM: the same name."""

    wraps: ClassVar = {ReplicatedLinear: None}


class MergedColumnParallelLinearWithLoRA(BaseLayerWithLoRA):
    """gate_proj and up_proj in one, with two adapters. vLLM: the same name."""

    wraps: ClassVar = {MergedColumnParallelLinear: 2}


class MergedQKVParallelLinearWithLoRA(BaseLayerWithLoRA):
    """q, k and v in one, with three adapters. vLLM: the same name."""

    wraps: ClassVar = {QKVParallelLinear: 3}


class QKVParallelLinearWithLoRA(BaseLayerWithLoRA):
    """q, k and v in one, with one adapter over all three: the checkpoint is fused, too. vLLM: the same name."""

    wraps: ClassVar = {QKVParallelLinear: 1}
