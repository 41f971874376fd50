"""vLLM's names for the products in PyTorch. Stands for vllm/lora/ops/torch_ops/lora_ops.py (v0.22.1)."""

import torch

from minivllm.lora.ops.by_run import sgmv_expand_slice, sgmv_shrink
from minivllm.lora.ops.by_token import bgmv_expand_slice, bgmv_shrink

__all__ = [
    "bgmv_expand",
    "bgmv_expand_slice",
    "bgmv_shrink",
    "sgmv_expand",
    "sgmv_expand_slice",
    "sgmv_shrink",
]


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """`bgmv_expand_slice` over the first columns, as many as B has rows."""
    size = min(lora_b_weights.shape[-2], output_tensor.shape[1])
    bgmv_expand_slice(
        inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, size, add_inputs=add_inputs
    )


def sgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    add_inputs: bool = False,
) -> None:
    """`sgmv_expand_slice` over the first columns, as many as B has rows."""
    size = min(lora_b_weights.shape[-2], output_tensor.shape[1])
    sgmv_expand_slice(
        inputs,
        lora_b_weights,
        output_tensor,
        b_seq_start_loc,
        seq_len_tensor,
        lora_indices_tensor,
        batches,
        max_seq_length,
        token_nums,
        slice_offset=0,
        slice_size=size,
        add_inputs=add_inputs,
    )
