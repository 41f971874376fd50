"""Shrink and expand, one product for each run of rows with the same adapter.

Stands for vllm/lora/ops/torch_ops (v0.22.1), whose signatures are in lora/vllm. Shapes, dtypes and base rows are as in
`by_token`. `runs` has (slot, rows) of every run with an adapter (`compute_runs`).
"""

from collections.abc import Iterable

import torch

from minivllm.lora.ops.by_token import matrices, widest_dtype

Runs = Iterable[tuple[int, slice]]


# region lab 3.5: shrink and expand, a run at a time
def shrink_runs(
    inputs: torch.Tensor, lora_a: torch.Tensor, output: torch.Tensor, runs: Runs, scaling: float = 1.0
) -> None:
    """What `bgmv_shrink` computes, one matrix product for each run of tokens with the same slot."""
    lora_a = matrices(lora_a)  # (S, R, K)
    rank, dtype = lora_a.shape[1], widest_dtype(inputs, lora_a, output)
    for slot, rows in runs:
        shrunk = inputs[rows].to(dtype) @ lora_a[slot].to(dtype).t()  # (rows, R)
        output[rows, :rank] = scaling * shrunk


def expand_runs(
    inputs: torch.Tensor,
    lora_b: torch.Tensor,
    output: torch.Tensor,
    runs: Runs,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """What `bgmv_expand_slice` computes, one matrix product a run."""
    lora_b = matrices(lora_b)[:, :slice_size]  # (S, size, R)
    rank, dtype = lora_b.shape[2], widest_dtype(inputs, lora_b, output)
    columns = slice(slice_offset, slice_offset + slice_size)
    for slot, rows in runs:
        expanded = inputs[rows, :rank].to(dtype) @ lora_b[slot].to(dtype).t()  # (rows, size)
        kept = output[rows, columns] if add_inputs else 0
        output[rows, columns] = kept + expanded


# endregion
