"""Linears in int8, by torchao. Stands for vllm/model_executor/layers/quantization/torchao.py (v0.22.1)."""

import torch
from torch import nn

from minivllm.layers.linear import LinearBase
from minivllm.quiet import no_warnings_of_torchao

# The head reads what all blocks have computed, and the router's near ties decide which experts run.
KEPT_IN_FULL = ("lm_head", "gate")


def quantize_linears(model: nn.Module, device: torch.device | str) -> None:
    """Quantize the weights of a loaded model's linears and move the model to `device`, linear by linear.

    Where the model comes from the CPU, the device never holds more than one of these weights in full.

    A weight (N, K) becomes torchao's Int8Tensor: (N, K) int8 and one float32 scale a row. Its shape and dtype read as
    before, so F.linear takes it, and what is computed and adapted stays in the model's dtype. Each row of a fused
    linear is scaled alone, hence as it would be unfused. Embeddings, norms, experts and KEPT_IN_FULL stay as they are.
    """
    with no_warnings_of_torchao():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    # With its inductor settings it would change torch.compile for everybody.
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False), _is_quantized, device)


def _is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, LinearBase) and name.rpartition(".")[2] not in KEPT_IN_FULL
