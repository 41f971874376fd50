"""Shrink and expand, one product for each adapter of the batch.

Stands for vllm/lora/ops/torch_ops (v0.22.1), whose signatures are in minivllm/vllm. Shapes, dtypes and base rows are as
in `by_token`. `runs` has (slot, rows) of every run with an adapter (`compute_runs`).
"""

from labs.kit.overlay import Todo
from collections.abc import Iterable, Sequence

import torch

from minivllm.lora.ops.by_token import matrices, widest_dtype

Runs = Iterable[tuple[int, slice]]
Rows = slice | Sequence[int] | torch.Tensor  # what picks rows of a tensor: tensor[rows]


# region lab 3.5: one product for each adapter
def products(
    inputs: torch.Tensor, weights: torch.Tensor, runs: Runs, dtype: torch.dtype
) -> list[tuple[Rows, torch.Tensor]]:
    """Every adapter's rows times its matrix: (rows, product) of each adapter that has a row, in any order.

    inputs: (T, in) float    weights: (S, out, in) float    product: (as many as rows, out) of `dtype`
    runs    can be gone through once. Their order is anyone's; an adapter may have several; a run may be empty; no row
            is in two
    dtype   the widest of all, to multiply in

    Row i of a product is that of inputs[rows][i]. What it may cost is counted:

    products   one for each adapter, however many runs and rows it has
    weights    a matrix that is in use is converted once, if its dtype is another; nothing else of them is copied
    inputs     of an adapter whose rows lie together in the batch none are copied, if their dtype is `dtype`; of others
               each row once

    By hand, runs (1, 0:2), (0, 2:3), (1, 3:4), (2, 4:4): a product of rows 0, 1 and 3 by slot 1 and one of row 2 by
    slot 0, for which three rows are copied, those of slot 1.
    To work out: how many are, of the runs (1, 2:4), (0, 4:5), (1, 0:2)?
    """
    raise Todo("lab 3.5: one product for each adapter")


# endregion


def shrink_runs(
    inputs: torch.Tensor, lora_a: torch.Tensor, output: torch.Tensor, runs: Runs, scaling: float = 1.0
) -> None:
    """What `bgmv_shrink` computes, one matrix product for each adapter."""
    lora_a = matrices(lora_a)  # (S, R, K)
    rank, dtype = lora_a.shape[1], widest_dtype(inputs, lora_a, output)
    for rows, shrunk in products(inputs, lora_a, runs, dtype):
        output[rows, :rank] = (scaling * shrunk).to(output.dtype)  # (rows, R)


def expand_runs(
    inputs: torch.Tensor,
    lora_b: torch.Tensor,
    output: torch.Tensor,
    runs: Runs,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """What `bgmv_expand_slice` computes, one matrix product for each adapter."""
    lora_b = matrices(lora_b)[:, :slice_size]  # (S, size, R)
    rank, dtype = lora_b.shape[2], widest_dtype(inputs, lora_b, output)
    columns = slice(slice_offset, slice_offset + slice_size)
    for rows, expanded in products(inputs[:, :rank], lora_b, runs, dtype):
        kept = output[rows, columns] if add_inputs else 0
        output[rows, columns] = (kept + expanded).to(output.dtype)  # (rows, size)
