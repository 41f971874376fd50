"""The LoRA products of a mixed batch as Triton kernels. Stands for vllm/lora/ops/triton_ops (v0.22.1)."""

from minivllm.lora.ops.triton_ops.lora_expand_op import expand, lora_expand
from minivllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta, TileList, tiles_of
from minivllm.lora.ops.triton_ops.lora_shrink_op import lora_shrink, shrink

__all__ = ["LoRAKernelMeta", "TileList", "expand", "lora_expand", "lora_shrink", "shrink", "tiles_of"]
