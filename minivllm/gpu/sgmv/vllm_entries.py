"""The two products by vLLM's signatures. Stands for the entries of vllm/lora/ops/triton_ops (v0.22.1)."""

from collections.abc import Sequence

import torch

from minivllm.gpu.sgmv.lora_expand_op import expand
from minivllm.gpu.sgmv.lora_kernel_metadata import TileList
from minivllm.gpu.sgmv.lora_shrink_op import shrink


def lora_shrink(
    inputs: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    output: torch.Tensor,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    count: int,
    block_rows: int,
    scaling: float,
) -> None:
    """output[i] = scaling * inputs · A_iᵀ, complete sums. vLLM: `lora_shrink`.

    inputs          (T, K)
    lora_a_weights  n x (S, R, K) or (S, 1, R, K)
    output          (n, T, R) float32, contiguous; base rows become zero
    rows .. block_rows  what `LoRAKernelMeta.meta_args` gives
    """
    output.zero_()
    weights = [a.flatten(0, -3) for a in lora_a_weights]  # n x (S, R, K)
    shrink(inputs, weights, TileList(rows, tiles, count, block_rows), scaling=scaling, h=output[None])


def lora_expand(
    inputs: torch.Tensor,
    lora_b_weights: Sequence[torch.Tensor],
    output: torch.Tensor,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    count: int,
    block_rows: int,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """output[:, slice i] (+)= inputs[i] · B_iᵀ. vLLM: `lora_expand`.

    inputs          (n, T, R)
    lora_b_weights  n x (S, N_i, R) or (S, 1, N_i, R)
    output          (T, >= offset_start + N)
    rows .. block_rows  what `LoRAKernelMeta.meta_args` gives
    offset_start    column of `output` where the first slice begins
    add_inputs      add to what is there, else overwrite; base rows are left alone either way
    """
    weights = [b.flatten(0, -3) for b in lora_b_weights]  # n x (S, N_i, R)
    output, tile_list = output[:, offset_start:], TileList(rows, tiles, count, block_rows)
    expand(inputs[None], weights, output, tile_list, add_inputs=add_inputs)
