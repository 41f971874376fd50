"""The same quantization by transformers and torchao, and what is stored for quantized weights."""

from pathlib import Path

import torch
from tiny_oracle import Oracle


def quantization_config():
    """For from_pretrained: what `quantization="torchao"` is here."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))


def quantized_oracle(base: Path, adapters: dict[str, Path], dtype: torch.dtype = torch.float32) -> Oracle:
    """transformers' model, quantized when loaded, with PEFT's adapters, name -> folder, on top of it."""
    oracle = Oracle(base, dtype, quantization_config=quantization_config())
    for name, folder in adapters.items():
        oracle.load(name, folder)
    return oracle


def quantized_names(model: torch.nn.Module) -> set[str]:
    """Of the parameters that are in int8."""
    from torchao.quantization import Int8Tensor

    return {name for name, weight in model.named_parameters() if isinstance(weight, Int8Tensor)}


def stored_bytes(weight: torch.Tensor) -> int:
    """Of a weight, or of all that a quantized one is made of."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    pieces, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, piece).nbytes for piece in pieces)
