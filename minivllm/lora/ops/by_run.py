"""Shrink and expand, one product for each run of rows with the same adapter.

Stands for vllm/lora/ops/torch_ops (v0.22.1). Shapes, dtypes and base rows are as in `by_token`; B runs.
"""

from collections.abc import Iterator

import torch

from minivllm.lora.ops.by_token import matrices, widest_dtype


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
    lora_a = matrices(lora_a_weights)  # (S, R, K)
    rank, dtype = lora_a.shape[1], widest_dtype(inputs, lora_a, output_tensor)
    for slot, rows in _runs(
        b_seq_start_loc[:batches], seq_len_tensor[:batches], lora_indices_tensor[:batches]
    ):
        shrunk = inputs[rows].to(dtype) @ lora_a[slot].to(dtype).t()  # (rows, R)
        output_tensor[rows, :rank] = scaling * shrunk


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
    lora_b = matrices(lora_b_weights)[:, :slice_size]  # (S, size, R)
    rank, dtype = lora_b.shape[2], widest_dtype(inputs, lora_b, output_tensor)
    columns = slice(slice_offset, slice_offset + slice_size)
    for slot, rows in _runs(
        b_seq_start_loc[:batches], seq_len_tensor[:batches], lora_indices_tensor[:batches]
    ):
        expanded = inputs[rows, :rank].to(dtype) @ lora_b[slot].to(dtype).t()  # (rows, size)
        kept = output_tensor[rows, columns] if add_inputs else 0
        output_tensor[rows, columns] = kept + expanded


# endregion
