"""Shrink and expand in plain PyTorch: the readable truth. Stands for vllm/lora/ops/torch_ops/lora_ops.py (v0.22.1).

`bgmv_*` (batched gather matrix-vector) look the adapter up for each token; `sgmv_*` (segmented gather
matrix-vector) take runs of tokens that share one, a matrix product a run. Punica, arXiv:2310.18547.

Letters: T tokens, K input width, N output width, S slots, R rank of the slots, B runs. Weights are (S, out, in)
or (S, 1, out, in). Products are summed in the widest dtype of input, weights and output, and rounded once, when
they are written.

In every op a slot of -1 is a base row, and base rows of the output are left as they are. vLLM 0.22.1's CPU ops
index with the -1 and give such rows the last slot's adapter (fixed in 0.33.0).
"""

from minivllm.labs import Todo
import functools
from collections.abc import Iterator

import torch


def _matrices(weights: torch.Tensor) -> torch.Tensor:
    """One matrix a slot, however the slots are stored.   (S, 1, out, in) or (S, out, in) -> (S, out, in)"""
    return weights.squeeze(1) if weights.ndim == 4 else weights  # (S, out, in)


def _widest_dtype(*tensors: torch.Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


# region lab 3.2: shrink, one token at a time
def bgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """output[t] = scaling * A[slot of t] · inputs[t]. Columns past R are left as they are.

    inputs: (T, K) float    lora_a_weights: (S, R, K) or (S, 1, R, K) float    output_tensor: (T, >=R) float
    lora_indices_tensor: (T,) int slot of each token, -1 = base row
    """
    raise Todo("lab 3.2: shrink, one token at a time")


# endregion


# region lab 3.3: expand into a slice, one token at a time
def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """output[t, offset:offset+size] (+)= B[slot of t] · inputs[t]. Other columns are left as they are.

    inputs: (T, >=R) float    lora_b_weights: (S, >=size, R) or (S, 1, >=size, R) float    output_tensor: (T, N) float
    lora_indices_tensor: (T,) int slot of each token, -1 = base row
    add_inputs  add to what the output holds, or replace it
    """
    raise Todo("lab 3.3: expand into a slice, one token at a time")


# endregion


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


def _runs(starts: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(slot, rows) of every run that has an adapter."""
    for start, length, slot in zip(starts.tolist(), lengths.tolist(), slots.tolist()):
        if slot >= 0:
            yield slot, slice(start, start + length)


# region lab 3.5: shrink and expand, a run at a time
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
    """What `bgmv_shrink` computes, one matrix product for each run of tokens with the same slot.

    b_seq_start_loc: (B,) int first row of each run    seq_len_tensor: (B,) int its rows
    lora_indices_tensor: (B,) int its slot, -1 = base rows
    batches        runs that count, where the three are longer
    max_seq_length, token_nums   longest run, rows in all: what a kernel's grid is made from, and not needed here
    """
    raise Todo("lab 3.5: shrink and expand, a run at a time")


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
    """What `bgmv_expand_slice` computes, one matrix product a run."""
    raise Todo("lab 3.5: shrink and expand, a run at a time")


# endregion


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
