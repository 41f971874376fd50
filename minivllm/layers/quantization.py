"""Linears in int8, by torchao. Stands for vllm/model_executor/layers/quantization/torchao.py (v0.22.1)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from minivllm.layers.linear import LinearBase, RowParallelLinear

# The head reads what all blocks have computed, and the router's near ties decide which experts run.
KEPT_IN_FULL = ("lm_head", "gate")


def quantize_linears(model: nn.Module, device: torch.device | str) -> None:
    """Quantize the weights of a loaded model's linears and move the model to `device`, linear by linear.

    Where the model comes from the CPU, the device never holds more than one of these weights in full.

    A weight (N, K) becomes torchao's Int8Tensor: (N, K) int8 and one float32 scale a row. Its shape and dtype read as
    before, so F.linear takes it, and what is computed and adapted stays in the model's dtype. Each row of a fused
    linear is scaled alone, hence as it would be unfused. Embeddings, norms, experts and KEPT_IN_FULL stay as they are.

    Where processes share the model, they have parts of the same int8 weights that one process would have.
    """
    with no_warnings_of_torchao():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.tp.size > 1:
            _quantize_parts_of_rows(module)
    # With its inductor settings it would change torch.compile for everybody.
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False), _is_quantized, device)


def _quantize_parts_of_rows(linear: RowParallelLinear) -> None:
    """Quantize a weight of which each process has a part of every row, by the scale of whole rows."""
    from torchao.quantization import Int8Tensor, PerRow

    weight = linear.weight.detach()
    own = Int8Tensor.from_hp(weight, PerRow()).scale  # (N, 1)
    scale = linear.tp.all_gather(own).amax(dim=1, keepdim=True)
    linear.weight = nn.Parameter(Int8Tensor.from_hp(weight, PerRow(), scale=scale), requires_grad=False)


def _is_quantized(module: nn.Module, name: str) -> bool:
    """Whether it is to be; what processes have quantized together is."""
    is_plain = isinstance(module, LinearBase) and type(module.weight) is nn.Parameter
    return is_plain and name.rpartition(".")[2] not in KEPT_IN_FULL


@contextmanager
def no_warnings_of_torchao() -> Iterator[None]:
    """For a program of other people's, whose logging is theirs: nobody warns inside."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
