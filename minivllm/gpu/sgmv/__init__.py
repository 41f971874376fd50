"""The LoRA products of a mixed batch as Triton kernels. Stands for vllm/lora/ops/triton_ops (v0.22.1)."""

from minivllm.gpu.sgmv.lora_expand_op import expand
from minivllm.gpu.sgmv.lora_kernel_metadata import LoRAKernelMeta, TileList, tiles_of
from minivllm.gpu.sgmv.lora_shrink_op import shrink
from minivllm.gpu.sgmv.vllm_entries import lora_expand, lora_shrink

__all__ = ["LoRAKernelMeta", "TileList", "expand", "lora_expand", "lora_shrink", "shrink", "tiles_of"]
