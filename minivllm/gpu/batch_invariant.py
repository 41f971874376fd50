"""Linears whose rows have the same bits in every batch. Stands for vllm/model_executor/layers/batch_invariant.py."""

import torch
from torch import nn

from minivllm.layers.linear import LinearBase


def make_batch_invariant(model: nn.Module) -> None:
    """From now on every linear of the model, and its head, is computed by one kernel in one order.

    A library chooses its kernel, and so the order of its sums, by the number of rows. The other layers of a block take
    each row alone already. Attention is the model runner's (`build_invariant_attention`), adapters are the backend's.
    """
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.compute_with(_product)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: (..., K) -> (..., N), as `F.linear`"""
    # Imported here, so that a machine without Triton still serves on its CPU.
    from minivllm.gpu.kernels.invariant_linear import invariant_linear

    y = invariant_linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], -1)
