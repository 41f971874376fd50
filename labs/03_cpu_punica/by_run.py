"""Shrink and expand, one product for each run of rows with the same adapter.

Stands for vllm/lora/ops/torch_ops (v0.22.1), whose signatures are in lora/vllm. Shapes, dtypes and base rows are as in
`by_token`. `runs` has (slot, rows) of every run with an adapter (`compute_runs`).
"""

from labs.kit.overlay import Todo
from collections.abc import Iterable

import torch

from minivllm.lora.ops.by_token import matrices, widest_dtype

Runs = Iterable[tuple[int, slice]]


# region lab 3.5: shrink and expand, a run at a time
def shrink_runs(
    inputs: torch.Tensor, lora_a: torch.Tensor, output: torch.Tensor, runs: Runs, scaling: float = 1.0
) -> None:
    """What `bgmv_shrink` computes, one matrix product for each run of tokens with the same slot.

    To use: `matrices(weights)`, which are (S, R, K), and `widest_dtype` (by_token.py).
    """
    raise Todo("lab 3.5: shrink and expand, a run at a time")


def expand_runs(
    inputs: torch.Tensor,
    lora_b: torch.Tensor,
    output: torch.Tensor,
    runs: Runs,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """What `bgmv_expand_slice` computes, one matrix product a run.

    To use: `matrices(weights)`, which are (S, N, R), and `widest_dtype` (by_token.py).
    """
    raise Todo("lab 3.5: shrink and expand, a run at a time")


# endregion
