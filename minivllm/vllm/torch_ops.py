"""vLLM's names for the products in PyTorch. Stands for vllm/lora/ops/torch_ops/lora_ops.py (v0.22.1)."""

from collections.abc import Iterator

import torch

from minivllm.lora.ops.by_run import expand_runs, shrink_runs
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


def sgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    scaling: float,
) -> None:
    """`shrink_runs`, of segments.

    b_seq_start_loc: (B,) int first row of each segment    seq_len_tensor: (B,) int its rows
    lora_indices_tensor: (B,) int its slot, -1 = base rows
    batches        segments that count, where the three are longer
    max_seq_length, token_nums   longest segment, rows in all: what a kernel's grid is made from, and not needed here
    """
    runs = _runs(b_seq_start_loc[:batches], seq_len_tensor[:batches], lora_indices_tensor[:batches])
    shrink_runs(inputs, lora_a_weights, output_tensor, runs, scaling)


def sgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> None:
    """`expand_runs`, of segments as `sgmv_shrink` takes them."""
    runs = _runs(b_seq_start_loc[:batches], seq_len_tensor[:batches], lora_indices_tensor[:batches])
    expand_runs(inputs, lora_b_weights, output_tensor, runs, slice_offset, slice_size, add_inputs)


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


def _runs(starts: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(slot, rows) of every segment that has an adapter."""
    for start, length, slot in zip(starts.tolist(), lengths.tolist(), slots.tolist()):
        if slot >= 0:
            yield slot, slice(start, start + length)
